"""Bodies of batch requests, and what their endpoints need of a store; the one in Redis.

Calls of a store that waits run on threads, beside requests that must not wait.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

import redis
from pydantic import Field, StringConstraints

from tasc_serve.errors import ApiError
from tasc_serve.http.schemas import Body
from tasc_serve.settings import LimitSettings
from tasc_serve.store_calls import StoreBusy, StoreCalls
from tasc_store import CorruptArtifact, StoreError, StoreFull, TaskStore
from tasc_store.batches.batch_store import Batch, BatchStore, NewBatch
from tasc_store.batches.files import FileLimits, FileStore, StoredFile
from tasc_store.errors import (
    BatchEnded,
    BatchesFull,
    FileInUse,
    FilesFull,
    LinesFull,
    UnknownBatch,
    UnknownFile,
)
from tasc_store.pages import Page

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
WINDOW_S: Final = 24 * 3600
SHORTEST_S: Final = 3600
LONGEST_S: Final = 2_592_000

_Name = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_S, le=LONGEST_S)]


class BatchRequest(Body):
    """The body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Name, _Value], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchLine(Body):
    """One line of a batch's file. Its body is read by whoever answers it, as if it came alone."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


log = logging.getLogger(__name__)

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

    Args:
        calls: Runs them; a silent store holds up nothing but what needs it.
    """

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls

    @classmethod
    def of(cls, limits: LimitSettings) -> "StorageCalls":
        """Calls for parts of files, bounded as the settings say."""
        return cls(
            StoreCalls(
                "files and batches",
                threads=limits.store_threads,
                max_waiting=limits.max_store_calls,
                timeout_s=limits.file_timeout_s,
            )
        )

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


class UploadLike(Protocol):
    """See `tasc_store.batches.files.Upload`."""

    @property
    def size_bytes(self) -> int: ...

    def write(self, data: bytes) -> None: ...

    def keep(
        self, limits: FileLimits, filename: str, purpose: str, ttl_s: float, owner: str = ""
    ) -> StoredFile: ...

    def abandon(self) -> None: ...


class FilesLike(Protocol):
    """See `tasc_store.batches.files.FileStore`."""

    def begin(self) -> UploadLike: ...

    def require_room(self, limits: FileLimits, owner: str = "") -> None: ...

    def get(self, id_: str) -> StoredFile: ...

    def page(
        self,
        *,
        after: str = "",
        limit: int = 100,
        oldest_first: bool = False,
        wanted: Callable[[StoredFile], bool] = lambda file: True,
    ) -> Page[StoredFile]: ...

    def delete(self, id_: str) -> None: ...

    def head(self, file: StoredFile, count: int) -> bytes: ...

    def blocks(self, file: StoredFile) -> Iterator[bytes]: ...


class BatchesLike(Protocol):
    """See `tasc_store.batches.batch_store.BatchStore`."""

    def create(self, new: NewBatch, most: int, most_lines: int | None = None) -> Batch: ...

    def get(self, id_: str) -> Batch: ...

    def page(
        self,
        *,
        after: str = "",
        limit: int = 20,
        wanted: Callable[[Batch], bool] = lambda batch: True,
    ) -> Page[Batch]: ...

    def cancel(self, id_: str) -> Batch: ...


class BatchStorage(Protocol):
    """Files and batches. Every method, of its parts too, raises StoreError when the store fails."""

    @property
    def files(self) -> FilesLike: ...

    @property
    def batches(self) -> BatchesLike: ...

    def has_task(self, name: str) -> bool:
        """Whether a worker could answer for it, be it served here or not."""


class RedisStorage:
    """Files and batches in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self.files = FileStore(client)
        self.batches = BatchStore(client)
        self._tasks = TaskStore(client)

    def has_task(self, name: str) -> bool:
        return name in self._tasks.names()


def file_limits(limits: LimitSettings) -> FileLimits:
    return FileLimits(limits.max_files, limits.max_files_bytes)
