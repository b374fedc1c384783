"""The endpoints for files, in OpenAI's shape, and the store of files and batches behind them.

An upload is written to the gateway's disk within limits, and then to the store piece by piece.
Blocking calls of the store run on threads, so that other requests do not wait.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from tempfile import gettempdir
from typing import Any, Final, Self

import redis
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tasc_draft.files import data_folder
from tasc_runtime.sampling_options import SHOWN
from tasc_serve.access.access_control import AccessControl
from tasc_serve.http.parsing import arriving, chunks, limit_of, query_of
from tasc_serve.http.schemas import LONGEST_S, SHORTEST_S
from tasc_serve.http_errors import ApiError
from tasc_serve.settings import LimitSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import StoreError, TaskStore
from tasc_store.batches.batch_store import BatchStore
from tasc_store.batches.files import FileLimits, FileStore, StoredFile
from tasc_store.errors import UnknownFile

log = logging.getLogger(__name__)

_FORM_BYTES: Final = 65_536  # maximum size of a form without its file
_MAX_FIELDS: Final = 16
_LONGEST_VALUE: Final = 1024  # maximum bytes of a field that is not a file
_LONGEST_NAME: Final = 512  # maximum characters of a file's name
_STEP_BYTES: Final = 1 << 20  # bytes passed to the store at once
_MAX_LISTED: Final = 10_000
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class BatchStorage:
    """Files and batches. Methods of both stores raise `StoreError` when Redis or the files fail."""

    def __init__(self, client: redis.Redis, files_url: str) -> None:
        self.files = FileStore(client, files_url)
        self.batches = BatchStore(client)
        self._tasks = TaskStore(client)

    @classmethod
    def open(cls, client: redis.Redis, files_url: str | None) -> Self:
        """Opens the storage of files, and checks that all processes share it.

        Args:
            files_url: See `ServeSettings`. If unset, a failed check is only logged, since a
                service on several machines may need no files.

        Raises:
            StoreError: The storage cannot be used, or is not shared.
        """
        storage = cls(client, files_url or str(data_folder() / "files"))
        try:
            storage.files.require_shared()
        except StoreError as error:
            if files_url is not None:
                raise
            log.warning("this gateway accepts no uploads and no batches: %s", error)
        return storage

    def has_task(self, name: str) -> bool:
        """Whether the task exists, so that a worker can answer for it, even if it is not served."""
        return name in self._tasks.names()


@dataclass(frozen=True)
class StorageEndpoints:
    """The base of the endpoints for files and for batches, with access to an owner's files."""

    storage: BatchStorage
    limits: LimitSettings
    access: AccessControl
    calls: StoreCalls

    async def owner_of(self, request: Request) -> str:
        """The owner of a request's files and batches: the API key's id, or empty without keys."""
        key = await self.access.key_of(request)
        return key.id if key else ""

    async def file(self, id_: str, owner: str) -> StoredFile:
        """Returns a file; raises UnknownFile also for files of other owners, to hide them."""
        file = await self.calls.run(partial(self.storage.files.get, id_))
        if file.owner != owner:
            raise UnknownFile(f"there is no file {id_[:SHOWN]!r}; it was deleted, or has expired")
        return file

    @property
    def file_limits(self) -> FileLimits:
        return FileLimits(self.limits.max_files, self.limits.max_files_bytes)


def shown(file: StoredFile) -> dict[str, Any]:
    """A file in OpenAI's format."""
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


class Files(StorageEndpoints):
    """The endpoints below ``/v1/files``. All raise `StoreError`, see `http_errors.of_store`."""

    @cached_property
    def _uploads(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.limits.max_uploads)

    async def create(self, request: Request) -> dict[str, Any]:
        owner = await self.owner_of(request)
        if self._uploads.locked():
            message = f"{self.limits.max_uploads} files are being uploaded; try again later"
            raise ApiError(503, message, code="too_many_uploads")
        async with self._uploads:
            return shown(await self._created(request, owner))

    async def retrieve(self, request: Request, file_id: str) -> dict[str, Any]:
        return shown(await self._asked(request, file_id))

    async def delete(self, request: Request, file_id: str) -> dict[str, Any]:
        file = await self._asked(request, file_id)
        await self.calls.run(partial(self.storage.files.delete, file.id))
        return {"id": file.id, "object": "file", "deleted": True}

    async def content(self, request: Request, file_id: str) -> Response:
        """Sends a file. A block is read before the response, so a failure sets the status code."""
        file = await self._asked(request, file_id)
        blocks = self.storage.files.blocks(file)
        first = await self.calls.run(partial(next, blocks, b""))
        headers = {
            "Content-Length": str(file.size_bytes),
            "Content-Disposition": f'attachment; filename="{file.id}.jsonl"',
        }
        rest = self._rest(first, blocks)
        return StreamingResponse(rest, media_type="application/jsonl", headers=headers)

    async def listed(self, request: Request) -> dict[str, Any]:
        owner = await self.owner_of(request)
        query = query_of(request, ("after", "limit", "order", "purpose"))
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is {order[:SHOWN]!r}; it is asc or desc", "order")
        page = await self.calls.run(
            partial(
                self.storage.files.page,
                after=query.get("after", ""),
                limit=limit_of(query, _MAX_LISTED, _MAX_LISTED),
                oldest_first=order == "asc",
                wanted=lambda f: f.owner == owner and purpose in (None, f.purpose),
            )
        )
        return listing([shown(file) for file in page.items], page.has_more)

    async def _asked(self, request: Request, file_id: str) -> StoredFile:
        return await self.file(file_id, await self.owner_of(request))

    async def _created(self, request: Request, owner: str) -> StoredFile:
        await self.calls.run(partial(self.storage.files.require_room, self.file_limits, owner))
        longest_s = self.limits.upload_timeout_s
        end = asyncio.get_running_loop().time() + longest_s
        form = await self._received(request)
        try:
            file, fields = self._checked(form)
            async with asyncio.timeout_at(end):
                return await self._kept(file, self._ttl_s(fields), owner)
        except TimeoutError as error:
            message = f"the file was not stored within {longest_s:g} s; send it again, or in parts"
            raise ApiError(503, message) from error
        finally:
            await form.close()

    async def _received(self, request: Request) -> FormData:
        """Reads the form; a large file is written to disk.

        Raises:
            ApiError: 400 and 413 for a form that is not accepted, 408 for a form that arrives too
                slowly, 503 if the disk is full.
        """
        kind, options = parse_options_header(request.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "send the file as multipart/form-data, with its boundary")
        body = chunks(request, self.limits.max_file_bytes + _FORM_BYTES)
        parser = MultiPartParser(
            request.headers,
            _whole(body, b"\r\n--" + boundary + b"--"),
            max_files=1,
            max_fields=_MAX_FIELDS,
            max_part_size=_LONGEST_VALUE,
        )
        try:
            async with arriving(self.limits.upload_timeout_s):
                return await parser.parse()
        except MultiPartException as error:
            raise ApiError(400, f"the form cannot be read: {error.message}") from error
        except OSError as error:
            log.warning("an upload cannot be written to TMPDIR, %s: %s", gettempdir(), error)
            message = (
                "the gateway cannot write the file to its TMPDIR: "
                f"{error.strerror or 'the disk fails'}; try again later"
            )
            raise ApiError(503, message) from error

    def _checked(self, form: FormData) -> tuple[UploadFile, dict[str, str]]:
        """Returns the file and the other fields.

        Raises:
            ApiError: 400 if a field is missing or wrong; 413 if the file is too large.
        """
        fields: dict[str, str] = {}
        for name, value in form.multi_items():
            shown_name = name[:SHOWN]
            if name in fields or (name == "file" and len(form.getlist(name)) > 1):
                raise ApiError(400, f"{shown_name} is sent twice", shown_name)
            if name != "file" and name not in _FIELDS:
                raise ApiError(400, f"unknown field {shown_name}; remove it", shown_name)
            if isinstance(value, str):
                fields[name] = value
        file, purpose = form.get("file"), fields.get("purpose", "")
        if not isinstance(file, UploadFile):
            message = "the form has no file; send the file as the field file, with a file name"
            raise ApiError(400, message, "file")
        if purpose != "batch":
            message = f"purpose is {purpose[:SHOWN]!r}; only the purpose batch is accepted"
            raise ApiError(400, message, "purpose")
        if not file.size:
            raise ApiError(400, "the file is empty; write one request on each line", "file")
        if file.size > (max_bytes := self.limits.max_file_bytes):
            raise ApiError(413, f"the file has more than {max_bytes} bytes; split it", "file")
        return file, fields

    async def _kept(self, file: UploadFile, ttl_s: float, owner: str) -> StoredFile:
        upload = self.storage.files.begin()
        try:
            while block := await file.read(_STEP_BYTES):
                await self.calls.run(partial(upload.write, block))
        except BaseException:
            # Not awaited, since a cancelled request must not wait. Bytes that remain expire.
            asyncio.get_running_loop().run_in_executor(None, upload.abandon)
            raise
        name = _file_name(file.filename or "")
        # After an error here, the upload is not abandoned: Redis may have the file already.
        return await self.calls.run(
            partial(upload.keep, self.file_limits, name, "batch", ttl_s, owner)
        )

    def _ttl_s(self, fields: Mapping[str, str]) -> float:
        """The lifetime of the file in seconds."""
        anchor, seconds = (fields.get(name) for name in _FIELDS[1:])
        if anchor is None and seconds is None:
            return self.limits.file_ttl_s
        if anchor != "created_at":
            raise ApiError(400, "expires_after[anchor] must be created_at", _FIELDS[1])
        fits = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 9
        if not fits or not SHORTEST_S <= int(seconds or 0) <= LONGEST_S:
            message = f"expires_after[seconds] goes from {SHORTEST_S} to {LONGEST_S}"
            raise ApiError(400, message, _FIELDS[2])
        return float(seconds or 0)

    async def _rest(self, first: bytes, blocks: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yields all blocks; after an error, the body is shorter than Content-Length says."""
        block = first
        while block:
            yield block
            block = await self.calls.run(partial(next, blocks, b""))


def listing(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list in OpenAI's format."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


async def _whole(body: AsyncIterable[bytes], end: bytes) -> AsyncGenerator[bytes, None]:
    """Yields parts of a form; raises ApiError 400 if its end mark is missing.

    Starlette's parser would treat such a form as a form without a file, and leave the file open.
    """
    tail = b""
    async for chunk in body:
        tail = (tail + chunk)[-len(end) - 2 :]
        yield chunk
    if not tail.removesuffix(b"\r\n").endswith(end):
        raise ApiError(400, "the form is incomplete; send all of it")


def _file_name(name: str) -> str:
    """Returns the last part of a path, with unprintable characters replaced, as the stored name."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "_" for c in last)[:_LONGEST_NAME] or "file.jsonl"
