"""What the endpoints for files and batches need of a store; the one in Redis. It knows no HTTP."""

from collections.abc import Callable, Iterator
from typing import Protocol

import redis

from tasc_serve.settings import LimitSettings
from tasc_store import TaskStore
from tasc_store.batches import Batch, BatchStore, NewBatch
from tasc_store.files import FileLimits, FileStore, StoredFile
from tasc_store.pages import Page


class UploadLike(Protocol):
    """See `tasc_store.files.Upload`."""

    @property
    def size_bytes(self) -> int: ...

    def write(self, data: bytes) -> None: ...

    def keep(
        self, limits: FileLimits, filename: str, purpose: str, ttl_s: float, owner: str = ""
    ) -> StoredFile: ...

    def abandon(self) -> None: ...


class FilesLike(Protocol):
    """See `tasc_store.files.FileStore`."""

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
    """See `tasc_store.batches.BatchStore`."""

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
