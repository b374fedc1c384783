"""The endpoints for files, in OpenAI's shape: what goes into batches, and what comes out of them.

A file goes into the store piece by piece as it arrives. Nobody looks into it here.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from tasc_serve.access.access_control import AccessControl
from tasc_serve.errors import SHOWN, ApiError
from tasc_serve.http.batches.batch_storage import (
    LONGEST_S,
    SHORTEST_S,
    BatchStorage,
    StorageCalls,
    UploadLike,
    file_limits,
)
from tasc_serve.http.multipart import FileForm, FormError
from tasc_serve.http.parsing import limit_of, query_of, stream_body
from tasc_serve.settings import LimitSettings
from tasc_store.batches.files import StoredFile
from tasc_store.errors import UnknownFile

_FORM_BYTES: Final = 65_536  # of a form beside its file
_STEP_BYTES: Final = 262_144  # handed to the store at once
_MOST_LISTED: Final = 10_000
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


def add_files(
    routes: APIRouter,
    storage: BatchStorage,
    limits: LimitSettings,
    access: AccessControl,
    calls: StorageCalls,
) -> None:
    """Add the routes below ``/v1/files``."""
    files = Files(storage, limits, calls)
    places = asyncio.Semaphore(limits.max_uploads)

    @routes.post("/v1/files")
    async def create(request: Request) -> dict[str, Any]:
        owner = await owner_of(access, request)
        if places.locked():
            message = f"{limits.max_uploads} files are being uploaded; try again later"
            raise ApiError(503, message, code="too_many_uploads")
        async with places:
            return shown(await files.create(request, owner))

    @routes.get("/v1/files")
    async def listed(request: Request) -> dict[str, Any]:
        return await files.listed(request, await owner_of(access, request))

    @routes.get("/v1/files/{file_id}")
    async def retrieve(request: Request, file_id: str) -> dict[str, Any]:
        return shown(await files.get(file_id, await owner_of(access, request)))

    @routes.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        file = await files.get(file_id, await owner_of(access, request))
        await calls.run(partial(storage.files.delete, file.id))
        return {"id": file.id, "object": "file", "deleted": True}

    @routes.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        return await files.content(await files.get(file_id, await owner_of(access, request)))


async def owner_of(access: AccessControl, request: Request) -> str:
    """Whose files and batches a request may see: those of its key, where keys are asked for."""
    key = await access.key_of(request)
    return key.id if key else ""


def shown(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI has it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


class Files:
    """The store's files, as requests ask for them."""

    def __init__(self, storage: BatchStorage, limits: LimitSettings, calls: StorageCalls) -> None:
        self._files, self._limits, self._calls = storage.files, limits, calls
        self._bounds = file_limits(limits)

    async def get(self, id_: str, owner: str) -> StoredFile:
        return await self._calls.run(partial(owned_file, self._files.get, id_, owner))

    async def listed(self, request: Request, owner: str) -> dict[str, Any]:
        query = query_of(request, ("after", "limit", "order", "purpose"))
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:SHOWN]!r}; it is asc or desc", "order")
        page = await self._calls.run(
            partial(
                self._files.page,
                after=query.get("after", ""),
                limit=limit_of(query, _MOST_LISTED, _MOST_LISTED),
                oldest_first=order == "asc",
                wanted=lambda f: f.owner == owner and purpose in (None, f.purpose),
            )
        )
        return listing([shown(file) for file in page.items], page.has_more)

    async def create(self, request: Request, owner: str) -> StoredFile:
        await self._calls.run(partial(self._files.require_room, self._bounds, owner))
        upload = self._files.begin()
        try:
            form = await self._received(request, upload)
            ttl_s = self._ttl_s(form)
        except BaseException:
            # Not awaited: whoever is cancelled has no time, and what is left expires by itself.
            asyncio.get_running_loop().run_in_executor(None, upload.abandon)
            raise
        name = form.filename or ""
        return await self._calls.run(
            partial(upload.keep, self._bounds, name, "batch", ttl_s, owner)
        )

    async def _received(self, request: Request, upload: UploadLike) -> FileForm:
        held = bytearray()
        try:
            form = FileForm(request.headers.get("content-type", ""), held.extend)

            async def take(part: bytes) -> None:
                form.feed(part)
                if len(held) >= _STEP_BYTES:
                    await self._written(upload, held)

            most = self._limits.max_file_bytes + _FORM_BYTES
            await stream_body(request, most, self._limits.upload_timeout_s, take)
            await self._written(upload, held)
        except FormError as error:
            raise ApiError(400, str(error), error.field) from error
        self._require(form, upload)
        return form

    async def _written(self, upload: UploadLike, held: bytearray) -> None:
        block = bytes(held)
        held.clear()
        await self._calls.run(partial(upload.write, block))
        most = self._limits.max_file_bytes
        if upload.size_bytes > most:
            raise ApiError(413, f"the file has more than {most} bytes; split it", "file")

    def _require(self, form: FileForm, upload: UploadLike) -> None:
        """Raises ApiError 400 where the form says too little, or what nobody knows."""
        if not form.whole:
            raise ApiError(400, "the form breaks off; send it whole")
        if form.filename is None:
            raise ApiError(400, "the form has no file; send it as the field file", "file")
        for name in form.fields:
            if name not in _FIELDS:
                raise ApiError(400, f"unknown field {name[:SHOWN]}; remove it", name[:SHOWN])
        purpose = form.fields.get("purpose")
        if purpose != "batch":
            message = f"purpose is {(purpose or '')[:SHOWN]!r}; files are taken for batch alone"
            raise ApiError(400, message, "purpose")
        if not upload.size_bytes:
            raise ApiError(400, "the file is empty; write one request on each line", "file")

    def _ttl_s(self, form: FileForm) -> float:
        """How long the file is kept."""
        anchor, seconds = (form.fields.get(name) for name in _FIELDS[1:])
        if anchor is None and seconds is None:
            return self._limits.file_ttl_s
        if anchor != "created_at":
            raise ApiError(400, "expires_after counts from created_at alone", _FIELDS[1])
        fits = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
        if not fits or not SHORTEST_S <= int(seconds or 0) <= LONGEST_S:
            message = f"expires_after goes from {SHORTEST_S} to {LONGEST_S} seconds"
            raise ApiError(400, message, _FIELDS[2])
        return float(seconds or 0)

    async def content(self, file: StoredFile) -> Response:
        """The first piece is here before the answer begins, so that a failure has a code."""
        blocks = self._files.blocks(file)
        first = await self._calls.run(partial(next, blocks, b""))
        headers = {
            "Content-Length": str(file.size_bytes),
            "Content-Disposition": f'attachment; filename="{file.id}.jsonl"',
        }
        rest = self._rest(first, blocks)
        return StreamingResponse(rest, media_type="application/jsonl", headers=headers)

    async def _rest(self, first: bytes, blocks: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """An error cuts the answer short, which its length tells."""
        block = first
        while block:
            yield block
            block = await self._calls.run(partial(next, blocks, b""))


def owned_file(get: Any, id_: str, owner: str) -> StoredFile:
    """Raises UnknownFile for another's too: nobody is to learn what others have."""
    file: StoredFile = get(id_)
    if file.owner != owner:
        raise UnknownFile(f"there is no file {id_[:SHOWN]!r}; it was deleted, or has expired")
    return file


def listing(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list as OpenAI has it."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
