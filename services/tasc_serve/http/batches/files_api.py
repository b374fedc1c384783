"""The endpoints for files, in OpenAI's shape, and the store of files and batches behind them.

An upload is read onto disk within its bounds, and then goes into the store piece by piece. Calls of
a store that waits run on threads, beside requests that must not wait.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping
from functools import partial
from tempfile import gettempdir
from typing import Any, Final, TypeVar

import redis
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tasc_runtime.sampling_options import SHOWN
from tasc_serve.access.access_control import AccessControl
from tasc_serve.http.parsing import arriving, chunks, limit_of, query_of
from tasc_serve.http.schemas import LONGEST_S, SHORTEST_S
from tasc_serve.http_errors import ApiError
from tasc_serve.settings import LimitSettings
from tasc_serve.store_calls import StoreBusy, StoreCalls
from tasc_store import CorruptArtifact, StoreError, StoreFull, TaskStore
from tasc_store.batches.batch_store import BatchStore
from tasc_store.batches.files import CHUNK_BYTES, FileLimits, FileStore, StoredFile
from tasc_store.errors import (
    BatchEnded,
    BatchesFull,
    FileInUse,
    FilesFull,
    LinesFull,
    UnknownBatch,
    UnknownFile,
)

log = logging.getLogger(__name__)

_FORM_BYTES: Final = 65_536  # of a form beside its file
_MOST_FIELDS: Final = 16
_LONGEST_VALUE: Final = 1024  # bytes of a field that is no file
_LONGEST_NAME: Final = 512  # characters of a file's name
_STEP_BYTES: Final = 1 << 20  # handed to the store at once
_MOST_LISTED: Final = 10_000
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

Found = TypeVar("Found")
_CODES: Final[tuple[tuple[type[StoreError], int, str], ...]] = (
    (UnknownFile, 404, "file_not_found"),
    (UnknownBatch, 404, "batch_not_found"),
    (FileInUse, 400, "file_in_use"),
    (BatchEnded, 400, "batch_ended"),
    (FilesFull, 429, "too_many_files"),
    (BatchesFull, 429, "too_many_batches"),
    (LinesFull, 429, "too_many_batch_lines"),
    (CorruptArtifact, 500, "file_damaged"),
)


class StorageCalls:
    """Calls of the store of files and batches, whose failures are answers.

    They are bounded as the settings say; a silent store holds up nothing but what needs it.
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._calls = StoreCalls(
            "files and batches",
            threads=limits.store_threads,
            max_waiting=limits.max_store_calls,
            timeout_s=limits.file_timeout_s,
        )

    def close(self) -> None:
        self._calls.close()

    async def run(self, work: Callable[[], Found]) -> Found:
        """What ``work`` returns.

        Raises:
            ApiError: What is asked for is not there, or cannot be; 503 when the store fails, is
                silent, or too many calls wait for it.
        """
        try:
            return await self._calls.run(work)
        except StoreError as error:
            raise _told(error) from error


def _told(error: StoreError) -> ApiError:
    for kind, status, code in _CODES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    if isinstance(error, StoreBusy):
        return ApiError(503, str(error))
    log.warning("the store of files and batches fails: %s", error)
    if isinstance(error, StoreFull):
        return ApiError(503, "the store is full; delete files that you need no more")
    return ApiError(503, "files and batches cannot be reached at the moment; try again later")


class BatchStorage:
    """Files and batches in Redis. Methods of its parts raise `StoreError` when Redis fails."""

    def __init__(self, client: redis.Redis, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.files = FileStore(client, chunk_bytes=chunk_bytes)
        self.batches = BatchStore(client)
        self._tasks = TaskStore(client)

    def has_task(self, name: str) -> bool:
        """Whether a worker could answer for it, be it served here or not."""
        return name in self._tasks.names()


def file_limits(limits: LimitSettings) -> FileLimits:
    return FileLimits(limits.max_files, limits.max_files_bytes)


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
        longest_s = self._limits.upload_timeout_s
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
        """The form, with its file on disk if it is large.

        Raises:
            ApiError: 400 and 413 for what is no form that we take, 408 for one that comes too
                slowly, 503 where the disk takes no more.
        """
        kind, options = parse_options_header(request.headers.get("content-type"))
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "send the file as multipart/form-data, with its boundary")
        body = chunks(request, self._limits.max_file_bytes + _FORM_BYTES)
        parser = MultiPartParser(
            request.headers,
            _whole(body, b"\r\n--" + boundary + b"--"),
            max_files=1,
            max_fields=_MOST_FIELDS,
            max_part_size=_LONGEST_VALUE,
        )
        try:
            async with arriving(self._limits.upload_timeout_s):
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
        """The file and the other fields.

        Raises:
            ApiError: 400 where the form says too little, or what nobody knows; 413.
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
            message = "the form has no file; send it as the field file, with a file's name"
            raise ApiError(400, message, "file")
        if purpose != "batch":
            message = f"purpose is {purpose[:SHOWN]!r}; files are taken for batch alone"
            raise ApiError(400, message, "purpose")
        if not file.size:
            raise ApiError(400, "the file is empty; write one request on each line", "file")
        if file.size > (most := self._limits.max_file_bytes):
            raise ApiError(413, f"the file has more than {most} bytes; split it", "file")
        return file, fields

    async def _kept(self, file: UploadFile, ttl_s: float, owner: str) -> StoredFile:
        upload = self._files.begin()
        try:
            while block := await file.read(_STEP_BYTES):
                await self._calls.run(partial(upload.write, block))
        except BaseException:
            # Not awaited: whoever is cancelled has no time, and what is left expires by itself.
            asyncio.get_running_loop().run_in_executor(None, upload.abandon)
            raise
        name = _file_name(file.filename or "")
        # Not abandoned from here on: Redis may have kept a file whose reply was lost.
        return await self._calls.run(
            partial(upload.keep, self._bounds, name, "batch", ttl_s, owner)
        )

    def _ttl_s(self, fields: Mapping[str, str]) -> float:
        """How long the file is kept."""
        anchor, seconds = (fields.get(name) for name in _FIELDS[1:])
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


async def _whole(body: AsyncIterable[bytes], end: bytes) -> AsyncGenerator[bytes, None]:
    """A form as it comes. Raises ApiError 400 where it does not end as a form does.

    Starlette's parser takes such a form for one without a file, and leaves the file open.
    """
    tail = b""
    async for chunk in body:
        tail = (tail + chunk)[-len(end) - 2 :]
        yield chunk
    if not tail.removesuffix(b"\r\n").endswith(end):
        raise ApiError(400, "the form breaks off; send it whole")


def _file_name(name: str) -> str:
    """What is kept of a file's name: its last part, printable."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(c if c.isprintable() else "_" for c in last)[:_LONGEST_NAME] or "file.jsonl"
