"""Files and batches in memory, held to the same contract as those in Redis (`storage_contract`)."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tasc_store import StoreError
from tasc_store.batches.batch_store import Batch, NewBatch
from tasc_store.batches.files import FileLimits, StoredFile
from tasc_store.errors import (
    BatchEnded,
    BatchesFull,
    FileInUse,
    FilesFull,
    LinesFull,
    UnknownBatch,
    UnknownFile,
)
from tasc_store.pages import Page, new_id

BLOCK = 10


def _page(items, after: str, limit: int, oldest_first: bool, wanted) -> Page:
    ordered = sorted(items, key=lambda item: item.id, reverse=not oldest_first)
    if after:
        behind = (lambda i: i > after) if oldest_first else (lambda i: i < after)
        ordered = [item for item in ordered if behind(item.id)]
    found = [item for item in ordered if wanted(item)]
    return Page(tuple(found[:limit]), len(found) > limit)


class FakeUpload:
    def __init__(self, store: "FakeFiles") -> None:
        self._store, self.data, self.size_bytes = store, bytearray(), 0
        self.largest = 0

    def write(self, data: bytes) -> None:
        self._store.check()
        self.data += data
        self.size_bytes += len(data)
        self.largest = max(self.largest, len(data))

    def keep(
        self, limits: FileLimits, filename: str, purpose: str, ttl_s: float, owner: str = ""
    ) -> StoredFile:
        if not self.data:
            raise ValueError("the file is empty")
        self._store.require_room(limits, owner, len(self.data))
        now = int(time.time())
        digest = hashlib.sha256(self.data).hexdigest()
        size, chunks = len(self.data), -(-len(self.data) // BLOCK)
        file = StoredFile(
            *(new_id("file"), filename, purpose, size, digest, chunks),
            *("part", now, int(now + ttl_s), owner, len(self.data.splitlines())),
        )
        self._store.kept[file.id] = (file, bytes(self.data))
        return file

    def abandon(self) -> None:
        self._store.abandoned += 1


class FakeFiles:
    def __init__(self) -> None:
        self.kept: dict[str, tuple[StoredFile, bytes]] = {}
        self.held: list[str] = []
        self.down: StoreError | None = None
        self.begun: list[FakeUpload] = []
        self.abandoned = 0

    def check(self) -> None:
        if self.down:
            raise self.down

    def begin(self) -> FakeUpload:
        self.begun.append(FakeUpload(self))
        return self.begun[-1]

    def require_room(self, limits: FileLimits, owner: str = "", size: int = 1) -> None:
        self.check()
        total = sum(len(data) for _, data in self.kept.values())
        if len(self.kept) >= limits.max_files or total + size > limits.max_bytes:
            raise FilesFull("no room; delete some")
        own = [len(data) for file, data in self.kept.values() if owner and file.owner == owner]
        over = len(own) >= limits.max_files / 2 or sum(own) + size > limits.max_bytes / 2
        if own and over:
            raise FilesFull("this key has half; delete some")

    def get(self, id_: str) -> StoredFile:
        self.check()
        if id_ not in self.kept:
            raise UnknownFile(f"there is no file {id_!r}")
        return self.kept[id_][0]

    def page(
        self,
        *,
        after: str = "",
        limit: int = 100,
        oldest_first: bool = False,
        wanted: Callable[[StoredFile], bool] = lambda file: True,
    ) -> Page[StoredFile]:
        self.check()
        return _page([f for f, _ in self.kept.values()], after, limit, oldest_first, wanted)

    def delete(self, id_: str) -> None:
        self.get(id_)
        if id_ in self.held:
            raise FileInUse(f"file {id_} is read by a batch")
        del self.kept[id_]

    def head(self, file: StoredFile, count: int) -> bytes:
        self.check()
        return self.kept[file.id][1][:count]

    def blocks(self, file: StoredFile) -> Iterator[bytes]:
        self.check()
        data = self.kept[file.id][1]
        yield from (data[i : i + BLOCK] for i in range(0, len(data), BLOCK))


class FakeBatches:
    def __init__(self, files: FakeFiles) -> None:
        self._files = files
        self.kept: dict[str, Batch] = {}

    def create(self, new: NewBatch, most: int, most_lines: int | None = None) -> Batch:
        file = self._files.get(new.input_file_id)
        if len(self.kept) >= most:
            raise BatchesFull(f"there are {most} batches")
        own = sum(new.owner == batch.owner != "" for batch in self.kept.values())
        if own and own >= most / 2:
            raise BatchesFull(f"this key has half of {most} batches")
        open_ = [
            b.input_file_id for b in self.kept.values() if b.owner == new.owner and not b.ended
        ]
        lines = sum(self._files.get(id_).lines for id_ in open_) + file.lines
        if most_lines is not None and lines > most_lines:
            raise LinesFull(f"more than {most_lines} lines; wait")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch"), endpoint=new.endpoint, input_file_id=new.input_file_id,
            window=new.window, created_at=now, expires_at=int(now + new.window_s),
            status="validating", model=new.model, output_ttl_s=int(new.output_ttl_s),
            metadata=dict(new.metadata), owner=new.owner, at={},
        )  # fmt: skip
        self._files.held.append(new.input_file_id)
        self.kept[batch.id] = batch
        return batch

    def get(self, id_: str) -> Batch:
        self._files.check()
        if id_ not in self.kept:
            raise UnknownBatch(f"there is no batch {id_!r}")
        batch = self.kept[id_]
        if batch.status == "validating" and batch.expires_at <= time.time():
            self._files.held.remove(batch.input_file_id)
            batch = replace(batch, status="expired", at={"expired": int(time.time())})
            self.kept[id_] = batch
        return batch

    def page(
        self,
        *,
        after: str = "",
        limit: int = 20,
        wanted: Callable[[Batch], bool] = lambda batch: True,
    ) -> Page[Batch]:
        self._files.check()
        return _page(self.kept.values(), after, limit, False, wanted)

    def cancel(self, id_: str) -> Batch:
        batch = self.get(id_)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise BatchEnded(f"batch {id_} is {batch.status}")
        now = int(time.time())
        begun = batch.status == "in_progress"
        at = batch.at | {"cancelling": now} | ({} if begun else {"cancelled": now})
        self.kept[id_] = replace(batch, status="cancelling" if begun else "cancelled", at=at)
        if not begun:
            self._files.held.remove(batch.input_file_id)
        return self.kept[id_]


class FakeStorage:
    def __init__(self, *tasks: str) -> None:
        self.files = FakeFiles()
        self.batches = FakeBatches(self.files)
        self.has_task = partial(self._has_task, tasks)

    def _has_task(self, tasks: tuple[str, ...], name: str) -> bool:
        self.files.check()
        return name in tasks
