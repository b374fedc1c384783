"""Files, batches and workers for tests of the store."""

import time
from pathlib import Path

import redis

from tasc_serve.http.batches.files_api import BatchStorage
from tasc_store import TaskRecord, TaskStore
from tasc_store.batches.batch_store import Batch, NewBatch
from tasc_store.batches.files import FileLimits, StoredFile
from tasc_store.batches.leases import BatchLease, take_batch

ROOM = FileLimits(max_files=100, max_bytes=10_000)
DATA = bytes(range(35))


class Shelf(BatchStorage):
    """Files, and batches for the task `greet`."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        super().__init__(client, str(folder))
        self.client, self.folder = client, folder
        TaskStore(client).put(TaskRecord("greet", "m", "f" * 32, "{input}"))

    @property
    def stored(self) -> dict[str, bytes]:
        """The bytes on disk, by id."""
        return {path.name: path.read_bytes() for path in self.folder.glob("*/file-*")}

    def keep(
        self, data: bytes = DATA, room: FileLimits = ROOM, owner: str = "", ttl_s: int = 3600
    ) -> StoredFile:
        upload = self.files.begin()
        for i in range(0, len(data), 7):
            upload.write(data[i : i + 7])
        return upload.keep(room, "naïve 東京.jsonl", "batch", ttl_s, owner)

    def ask(self, file: StoredFile | None = None, most: int = 100, window_s: float = 60,
            most_lines: int | None = None) -> Batch:  # fmt: skip
        """Creates a batch; without ``file``, of a new file."""
        file, metadata = file or self.keep(), {"why": "naïve 東京"}
        new = NewBatch(
            file.id, "/v1/completions", "24h", window_s, "greet", 7200, 3600, metadata, file.owner
        )
        return self.batches.create(new, most, most_lines)

    def taken(self) -> BatchLease:
        """Takes a batch like a worker."""
        lease = take_batch(self.client, 60.0)
        assert lease
        return lease

    def expire(self, lease: BatchLease) -> None:
        """Lets the lease expire, as if its worker had been silent for long."""
        (name,) = self.client.scan_iter(f"*:lease:{lease.batch.id}")
        self.client.delete(name)

    def overdue(self, lease: BatchLease, late_s: float) -> None:
        """Makes the batch overdue by ``late_s`` seconds."""
        (name,) = self.client.scan_iter("*:open")
        self.client.zadd(name, {lease.batch.id: time.time() - late_s})

    def output(self, text: bytes) -> StoredFile:
        """Stores a worker's file, which is published at the end of its batch."""
        upload = self.files.begin()
        upload.write(text)
        return upload.end("out.jsonl", "batch_output", 3600)
