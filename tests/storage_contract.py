"""What every store of files and batches must do; the fake and the one in Redis are held to it."""

import time

import pytest

from tasc_serve.http.batches.batch_storage import BatchStorage
from tasc_store.batches.batch_store import Batch, NewBatch
from tasc_store.batches.files import FileLimits, StoredFile
from tasc_store.errors import (
    BatchesFull,
    FileInUse,
    FilesFull,
    LinesFull,
    UnknownBatch,
    UnknownFile,
)

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


class StorageContract:
    """Subclassed with a fixture ``storage`` that gives an empty one with the task ``greet``."""

    def test_a_file_comes_back_as_it_went_in(self, storage: BatchStorage) -> None:
        file = keep(storage, filename="naïve 東京.jsonl", owner="ann")
        assert storage.files.get(file.id) == file
        assert (file.filename, file.size_bytes, file.owner) == ("naïve 東京.jsonl", 35, "ann")
        assert file.expires_at == file.created_at + 3600
        assert b"".join(storage.files.blocks(file)) == DATA
        assert storage.files.head(file, 5) == DATA[:5]

    def test_no_file_is_made_of_nothing(self, storage: BatchStorage) -> None:
        with pytest.raises(ValueError, match="empty"):
            keep(storage, b"")
        assert storage.files.page().items == ()

    def test_a_file_that_is_not_there_is_said(self, storage: BatchStorage) -> None:
        for use in (storage.files.get, storage.files.delete):
            with pytest.raises(UnknownFile, match="file-1"):
                use("file-1")

    def test_files_are_bounded_in_number_and_together(self, storage: BatchStorage) -> None:
        storage.files.require_room(ROOM)
        keep(storage)
        storage.files.require_room(ROOM)
        for room in (FileLimits(1, 10_000), FileLimits(100, 60)):
            with pytest.raises(FilesFull, match="delete"):
                keep(storage, room=room)
        with pytest.raises(FilesFull, match="delete"):
            storage.files.require_room(FileLimits(1, 10_000))
        assert len(storage.files.page().items) == 1

    def test_one_owner_leaves_half_of_the_room_for_files_to_others(
        self, storage: BatchStorage
    ) -> None:
        few, small = FileLimits(4, 10_000), FileLimits(100, 4 * len(DATA))
        first = keep(storage, room=FileLimits(1, len(DATA)), owner="ann")
        keep(storage, room=small, owner="ann")
        for room in (few, small):
            with pytest.raises(FilesFull, match="half"):
                keep(storage, room=room, owner="ann")
            with pytest.raises(FilesFull, match="half"):
                storage.files.require_room(room, "ann")
            storage.files.require_room(room, "bob")
            storage.files.require_room(room)
        keep(storage, room=few, owner="bob")
        storage.files.delete(first.id)
        keep(storage, room=few, owner="ann")

    def test_one_owner_leaves_half_of_the_batches_to_others(self, storage: BatchStorage) -> None:
        hers, his = keep(storage, owner="ann"), keep(storage, owner="bob")
        for _ in range(2):
            ask(storage, hers, most=4)
        with pytest.raises(BatchesFull, match="half"):
            ask(storage, hers, most=4)
        for _ in range(2):
            ask(storage, his, most=4)

    @pytest.mark.parametrize(
        ("data", "count"),
        [(b"a\n", 1), (b"a", 1), (b"a\n\nb\n", 3), (b"123456\n123456\n12", 3), (b"\n", 1)],
    )
    def test_a_file_knows_how_many_lines_it_has(
        self, storage: BatchStorage, data: bytes, count: int
    ) -> None:
        file = keep(storage, data)
        assert storage.files.get(file.id).lines == count

    def test_lines_of_one_owners_batches_are_bounded_until_they_end(
        self, storage: BatchStorage
    ) -> None:
        hers, his = keep(storage, b"a\nb\n", owner="ann"), keep(storage, b"a\n", owner="bob")
        first = ask(storage, hers, most_lines=5)
        ask(storage, hers, most_lines=5)
        with pytest.raises(LinesFull, match="5 lines.* wait"):
            ask(storage, hers, most_lines=5)
        assert len(storage.batches.page().items) == 2
        ask(storage, his, most_lines=5)
        storage.batches.cancel(first.id)
        ask(storage, hers, most_lines=5)
        with pytest.raises(LinesFull):
            ask(storage, his, most_lines=1)

    def test_pages_have_each_file_once_also_when_the_last_one_seen_is_deleted(
        self, storage: BatchStorage
    ) -> None:
        ids = []
        for i in range(7):
            ids.append(keep(storage, owner="ann" if i % 2 else "bob").id)
            time.sleep(0.002)
        first = storage.files.page(limit=3, oldest_first=True)
        assert [f.id for f in first.items] == ids[:3]
        assert first.has_more
        storage.files.delete(ids[2])
        rest = storage.files.page(after=ids[2], limit=4, oldest_first=True)
        assert ([f.id for f in rest.items], rest.has_more) == (ids[3:], False)
        newest = storage.files.page(limit=2, wanted=lambda f: f.owner == "ann")
        assert ([f.id for f in newest.items], newest.has_more) == ([ids[5], ids[3]], True)

    def test_a_batch_begins_with_all_that_was_said(self, storage: BatchStorage) -> None:
        file = keep(storage, owner="ann")
        batch = ask(storage, file)
        assert storage.batches.get(batch.id) == batch
        assert (batch.status, batch.endpoint, batch.window) == (
            "validating", "/v1/completions", "24h",
        )  # fmt: skip
        assert batch.metadata == {"why": "naïve 東京"}
        assert (batch.model, batch.owner, batch.input_file_id) == ("greet", "ann", file.id)
        assert batch.expires_at == batch.created_at + 60
        assert (batch.total, batch.completed, batch.failed, batch.at) == (0, 0, 0, {})

    def test_a_batch_needs_its_file_and_a_place(self, storage: BatchStorage) -> None:
        file = keep(storage)
        batch = ask(storage, file)
        with pytest.raises(BatchesFull, match="1 batches"):
            ask(storage, file, most=1)
        gone = keep(storage)
        storage.files.delete(gone.id)
        with pytest.raises(UnknownFile):
            ask(storage, gone)
        assert storage.batches.page().items == (batch,)

    def test_a_file_stays_as_long_as_a_batch_reads_it(self, storage: BatchStorage) -> None:
        file = keep(storage)
        batches = [ask(storage, file) for _ in range(2)]
        for batch in batches:
            with pytest.raises(FileInUse):
                storage.files.delete(file.id)
            storage.batches.cancel(batch.id)
        storage.files.delete(file.id)

    def test_a_batch_that_nobody_began_is_cancelled_at_once(self, storage: BatchStorage) -> None:
        batch = ask(storage, keep(storage))
        cancelled = storage.batches.cancel(batch.id)
        assert cancelled.status == "cancelled"
        assert set(cancelled.at) == {"cancelling", "cancelled"}
        assert storage.batches.cancel(batch.id) == cancelled

    def test_a_batch_that_nobody_began_in_time_has_expired(self, storage: BatchStorage) -> None:
        file = keep(storage)
        batch = ask(storage, file, window_s=0)
        assert storage.batches.get(batch.id).status == "expired"
        storage.files.delete(file.id)

    def test_a_batch_that_is_not_there_is_said(self, storage: BatchStorage) -> None:
        for use in (storage.batches.get, storage.batches.cancel):
            with pytest.raises(UnknownBatch, match="batch-1"):
                use("batch-1")

    def test_pages_of_batches_have_the_newest_first(self, storage: BatchStorage) -> None:
        file = keep(storage)
        ids = []
        for _ in range(5):
            ids.append(ask(storage, file).id)
            time.sleep(0.002)
        first = storage.batches.page(limit=3)
        assert ([b.id for b in first.items], first.has_more) == (ids[:1:-1], True)
        rest = storage.batches.page(after=first.items[-1].id, limit=3)
        assert ([b.id for b in rest.items], rest.has_more) == (ids[1::-1], False)

    def test_it_knows_which_tasks_there_are(self, storage: BatchStorage) -> None:
        assert storage.has_task("greet")
        assert not storage.has_task("nobody")
