"""The endpoints for batches, in OpenAI's shape.

This module only writes records. A worker, which is a separate process, reads a batch's lines and
answers them.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.datastructures import Headers

from tasc_runtime.data.file_kinds import MARK, wrong_kind
from tasc_runtime.sampling_options import SHOWN
from tasc_serve.access.access_control import AccessControl, InFlight
from tasc_serve.http.batches.files_api import BatchStorage, Files, StorageEndpoints, listing
from tasc_serve.http.parsing import limit_of, parsed, query_of, read_body
from tasc_serve.http.schemas import WINDOW_S, BatchRequest, documented
from tasc_serve.http_errors import ApiError
from tasc_serve.settings import LimitSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import ApiKey
from tasc_store.batches.batch_store import TIMES, Batch, NewBatch
from tasc_store.batches.files import StoredFile
from tasc_store.errors import UnknownBatch, UnknownFile

_LISTED: Final = 20
_MAX_LISTED: Final = 100
# Fields of a batch that have the same name in OpenAI's format.
_SAME: Final = (
    *("id", "endpoint", "model", "status", "input_file_id", "output_file_id", "error_file_id"),
    *("created_at", "expires_at"),
)
_COUNTS: Final = ("total", "completed", "failed")


def add_storage(
    app: FastAPI,
    storage: BatchStorage,
    limits: LimitSettings,
    access: AccessControl,
    in_flight: InFlight,
    origins: Sequence[str] = (),
) -> StoreCalls:
    """Adds the routes below ``/v1/files`` and ``/v1/batches``.

    Args:
        origins: Origins of web pages whose scripts may post to these routes; ``*``: any.

    Returns:
        The `StoreCalls` of the routes, which the caller must close.
    """

    async def inside(request: Request) -> AsyncGenerator[None, None]:
        """Spans a request from its first byte to the last byte of its answer."""
        if request.method == "POST":
            _require_allowed(request.headers, origins)
        in_flight.enter()
        try:
            yield
        finally:
            in_flight.leave()

    calls = StoreCalls(
        "files and batches",
        threads=limits.store_threads,
        max_waiting=limits.max_store_calls,
        timeout_s=limits.file_timeout_s,
    )
    files = Files(storage, limits, access, calls)
    batches = Batches(storage, limits, access, calls)
    endpoints: tuple[tuple[str, str, Callable[..., Any]], ...] = (
        ("POST", "/v1/files", files.create),
        ("GET", "/v1/files", files.listed),
        ("GET", "/v1/files/{file_id}", files.retrieve),
        ("DELETE", "/v1/files/{file_id}", files.delete),
        ("GET", "/v1/files/{file_id}/content", files.content),
        ("GET", "/v1/batches", batches.listed),
        ("GET", "/v1/batches/{batch_id}", batches.retrieve),
        ("POST", "/v1/batches/{batch_id}/cancel", batches.cancel),
    )
    routes = APIRouter(dependencies=[Depends(inside)])
    for method, path, endpoint in endpoints:
        routes.add_api_route(path, endpoint, methods=[method])
    routes.post("/v1/batches", openapi_extra=documented(BatchRequest))(batches.create)
    app.include_router(routes)
    return calls


def _require_allowed(headers: Headers, origins: Sequence[str]) -> None:
    """Raises ApiError 403 for other sites' pages: browsers send forms without a preflight."""
    origin = headers.get("origin")
    if origin is None or {origin, "*"} & {*origins}:
        return
    if origin.partition("://")[2] != headers.get("host"):
        shown_origin = repr(origin[:SHOWN])
        raise ApiError(403, f"Origin {shown_origin} is not allowed; add it to http.cors_origins")


def shown(batch: Batch) -> dict[str, Any]:
    """A batch in OpenAI's format."""
    faults = [asdict(fault) for fault in batch.errors]
    return {
        "object": "batch",
        **{name: getattr(batch, name) for name in _SAME},
        "errors": {"object": "list", "data": faults} if faults else None,
        "completion_window": batch.window,
        **{f"{name}_at": batch.at.get(name) for name in TIMES},
        "request_counts": {name: getattr(batch, name) for name in _COUNTS},
        "metadata": batch.metadata or None,
    }


class Batches(StorageEndpoints):
    """The endpoints below ``/v1/batches``. All raise `StoreError`, see `http_errors.of_store`."""

    async def create(self, request: Request) -> dict[str, Any]:
        key = await self.access.key_of(request)
        body = parsed(await read_body(request, self.limits), BatchRequest)
        owner = key.id if key else ""
        try:
            file = await self.file(body.input_file_id, owner)
        except UnknownFile as error:
            raise ApiError(400, str(error), "input_file_id", "file_not_found") from error
        if file.purpose != "batch":
            message = f"file {file.id} has purpose {file.purpose}; upload a file with purpose batch"
            raise ApiError(400, message, "input_file_id")
        await self.calls.run(partial(self.storage.files.require_room, self.file_limits, owner))
        model = await self._model(file, key)
        kept = body.output_expires_after
        new = NewBatch(
            input_file_id=file.id,
            endpoint=body.endpoint,
            window=body.completion_window,
            window_s=WINDOW_S,
            model=model,
            kept_s=self.limits.file_ttl_s,
            output_ttl_s=kept.seconds if kept else self.limits.file_ttl_s,
            metadata=body.metadata or {},
            owner=owner,
        )
        bounds = self.limits.max_batches, self.limits.max_open_batch_lines
        create = partial(self.storage.batches.create, new, *bounds)
        return shown(await self.calls.run(create))

    async def retrieve(self, request: Request, batch_id: str) -> dict[str, Any]:
        owner = await self.owner_of(request)
        batch = await self.calls.run(partial(self.storage.batches.get, batch_id))
        if batch.owner != owner:
            raise UnknownBatch(f"there is no batch {batch_id[:SHOWN]!r}")
        return shown(batch)

    async def cancel(self, request: Request, batch_id: str) -> dict[str, Any]:
        await self.retrieve(request, batch_id)
        return shown(await self.calls.run(partial(self.storage.batches.cancel, batch_id)))

    async def listed(self, request: Request) -> dict[str, Any]:
        owner = await self.owner_of(request)
        query = query_of(request, ("after", "limit"))
        page = await self.calls.run(
            partial(
                self.storage.batches.page,
                after=query.get("after", ""),
                limit=limit_of(query, _LISTED, _MAX_LISTED),
                wanted=lambda batch: batch.owner == owner,
            )
        )
        return listing([shown(batch) for batch in page.items], page.has_more)

    async def _model(self, file: StoredFile, key: ApiKey | None) -> str:
        """Returns the task that the first line names, which is the task of the whole batch.

        Raises:
            ApiError: 400: the line names no task; 403: the key may not use the task, whether it
                exists or not; 404: no task has that name.
        """
        read_head = partial(self.storage.files.head, file, self.limits.max_body_bytes)
        head = await self.calls.run(read_head)
        model = await asyncio.to_thread(_first_model, head)
        if model is None:
            words = wrong_kind(head) or (
                "has no request on its first line with a body that names a model; write one JSON "
                "object on each line"
            )
            raise ApiError(400, f"file {file.id} {words}", "input_file_id")
        self.access.allow(key, model)
        if not await self.calls.run(partial(self.storage.has_task, model)):
            message = f"the first line names model {model[:SHOWN]!r}, but no task has this name"
            raise ApiError(404, message, "model", "model_not_found")
        return model


def _first_model(head: bytes) -> str | None:
    line = head.removeprefix(MARK).lstrip().partition(b"\n")[0]
    try:
        content = json.loads(line.decode())
        model = content["body"]["model"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return model if isinstance(model, str) else None
