"""Files to keep and batches to ask for in tests of the store."""

from tasc_serve.http.batches.files_api import BatchStorage
from tasc_store.batches.batch_store import Batch, NewBatch
from tasc_store.batches.files import FileLimits, StoredFile

ROOM = FileLimits(max_files=100, max_bytes=10_000)
DATA = bytes(range(35))


def keep(
    storage: BatchStorage, data: bytes = DATA, room: FileLimits = ROOM, **said: str
) -> StoredFile:
    upload = storage.files.begin()
    for i in range(0, len(data), 7):
        upload.write(data[i : i + 7])
    name = said.get("filename", "in.jsonl")
    return upload.keep(room, name, "batch", 3600, said.get("owner", ""))


def ask(
    storage: BatchStorage,
    file: StoredFile,
    most: int = 100,
    window_s: float = 60,
    most_lines: int | None = None,
) -> Batch:
    said = {"why": "naïve 東京"}
    new = NewBatch(
        file.id, "/v1/completions", "24h", window_s, "greet", 7200, 3600, said, file.owner
    )
    return storage.batches.create(new, most, most_lines)
