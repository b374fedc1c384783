"""Files and batches in a real Redis: what is kept, what is refused, and what is left over."""

import time

import pytest
import redis
from batch_requests import DATA, ROOM, ask, keep

from support import eventually, refused
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_store import CorruptArtifact, StoreFull, TaskRecord, TaskStore
from tasc_store.batches.files import FileLimits
from tasc_store.errors import (
    BatchesFull,
    FileInUse,
    FilesFull,
    LinesFull,
    UnknownBatch,
    UnknownFile,
)

pytestmark = pytest.mark.redis


@pytest.fixture
def storage(client: redis.Redis) -> BatchStorage:
    record = TaskRecord(name="greet", model="m", fingerprint="f" * 32, template="{input}")
    TaskStore(client).put(record)
    return BatchStorage(client, chunk_bytes=10)


def test_a_file_comes_back_as_it_went_in(storage: BatchStorage) -> None:
    file = keep(storage, filename="naïve 東京.jsonl", owner="ann")
    assert storage.files.get(file.id) == file
    assert (file.filename, file.size_bytes, file.owner) == ("naïve 東京.jsonl", 35, "ann")
    assert file.expires_at == file.created_at + 3600
    assert b"".join(storage.files.blocks(file)) == DATA
    assert storage.files.head(file, 5) == DATA[:5]


def test_no_file_is_made_of_nothing(storage: BatchStorage) -> None:
    with refused(ValueError, "empty"):
        keep(storage, b"")
    assert storage.files.page().items == ()


def test_a_file_that_is_not_there_is_said(storage: BatchStorage) -> None:
    for use in (storage.files.get, storage.files.delete):
        with pytest.raises(UnknownFile):
            use("file-1")


def test_files_are_bounded_in_number_and_together(storage: BatchStorage) -> None:
    storage.files.require_room(ROOM)
    keep(storage)
    storage.files.require_room(ROOM)
    for room in (FileLimits(1, 10_000), FileLimits(100, 60)):
        with pytest.raises(FilesFull):
            keep(storage, room=room)
    with pytest.raises(FilesFull):
        storage.files.require_room(FileLimits(1, 10_000))
    assert len(storage.files.page().items) == 1


def test_one_owner_leaves_half_of_the_room_for_files_to_others(storage: BatchStorage) -> None:
    few, small = FileLimits(4, 10_000), FileLimits(100, 4 * len(DATA))
    first = keep(storage, room=FileLimits(1, len(DATA)), owner="ann")
    keep(storage, room=small, owner="ann")
    for room in (few, small):
        with pytest.raises(FilesFull):
            keep(storage, room=room, owner="ann")
        with pytest.raises(FilesFull):
            storage.files.require_room(room, "ann")
        storage.files.require_room(room, "bob")
        storage.files.require_room(room)
    keep(storage, room=few, owner="bob")
    storage.files.delete(first.id)
    keep(storage, room=few, owner="ann")


def test_one_owner_leaves_half_of_the_batches_to_others(storage: BatchStorage) -> None:
    hers, his = keep(storage, owner="ann"), keep(storage, owner="bob")
    for _ in range(2):
        ask(storage, hers, most=4)
    with pytest.raises(BatchesFull):
        ask(storage, hers, most=4)
    for _ in range(2):
        ask(storage, his, most=4)


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"a\n", 1), (b"a", 1), (b"a\n\nb\n", 3), (b"123456\n123456\n12", 3), (b"\n", 1)],
)
def test_a_file_knows_how_many_lines_it_has(storage: BatchStorage, data: bytes, count: int) -> None:
    file = keep(storage, data)
    assert storage.files.get(file.id).lines == count


def test_lines_of_one_owners_batches_are_bounded_until_they_end(storage: BatchStorage) -> None:
    hers, his = keep(storage, b"a\nb\n", owner="ann"), keep(storage, b"a\n", owner="bob")
    first = ask(storage, hers, most_lines=5)
    ask(storage, hers, most_lines=5)
    with pytest.raises(LinesFull):
        ask(storage, hers, most_lines=5)
    assert len(storage.batches.page().items) == 2
    ask(storage, his, most_lines=5)
    storage.batches.cancel(first.id)
    ask(storage, hers, most_lines=5)
    with pytest.raises(LinesFull):
        ask(storage, his, most_lines=1)


def test_pages_have_each_file_once_also_when_the_last_one_seen_is_deleted(
    storage: BatchStorage,
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


def test_a_batch_begins_with_all_that_was_said(storage: BatchStorage) -> None:
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


def test_a_batch_needs_its_file_and_a_place(storage: BatchStorage) -> None:
    file = keep(storage)
    batch = ask(storage, file)
    with pytest.raises(BatchesFull):
        ask(storage, file, most=1)
    gone = keep(storage)
    storage.files.delete(gone.id)
    with pytest.raises(UnknownFile):
        ask(storage, gone)
    assert storage.batches.page().items == (batch,)


def test_a_file_stays_as_long_as_a_batch_reads_it(storage: BatchStorage) -> None:
    file = keep(storage)
    batches = [ask(storage, file) for _ in range(2)]
    for batch in batches:
        with pytest.raises(FileInUse):
            storage.files.delete(file.id)
        storage.batches.cancel(batch.id)
    storage.files.delete(file.id)


def test_a_batch_that_nobody_began_is_cancelled_at_once(storage: BatchStorage) -> None:
    batch = ask(storage, keep(storage))
    cancelled = storage.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    assert set(cancelled.at) == {"cancelling", "cancelled"}
    assert storage.batches.cancel(batch.id) == cancelled


def test_a_batch_that_nobody_began_in_time_has_expired(storage: BatchStorage) -> None:
    file = keep(storage)
    batch = ask(storage, file, window_s=0)
    assert storage.batches.get(batch.id).status == "expired"
    storage.files.delete(file.id)


def test_a_batch_that_is_not_there_is_said(storage: BatchStorage) -> None:
    for use in (storage.batches.get, storage.batches.cancel):
        with pytest.raises(UnknownBatch):
            use("batch-1")


def test_pages_of_batches_have_the_newest_first(storage: BatchStorage) -> None:
    file = keep(storage)
    ids = []
    for _ in range(5):
        ids.append(ask(storage, file).id)
        time.sleep(0.002)
    first = storage.batches.page(limit=3)
    assert ([b.id for b in first.items], first.has_more) == (ids[:1:-1], True)
    rest = storage.batches.page(after=first.items[-1].id, limit=3)
    assert ([b.id for b in rest.items], rest.has_more) == (ids[1::-1], False)


def test_it_knows_which_tasks_there_are(storage: BatchStorage) -> None:
    assert storage.has_task("greet")
    assert not storage.has_task("nobody")


def pieces(client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter("*:data:*"))


def test_a_file_lies_in_pieces_that_go_away_with_it(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    names = pieces(client)
    assert [len(client.get(name)) for name in names] == [10, 10, 10, 5]
    assert all(0 < client.ttl(name) <= 3600 for name in names)
    storage.files.delete(file.id)
    assert pieces(client) == []
    assert storage.files.page().items == ()


def test_an_upload_that_breaks_off_leaves_nothing_for_long(
    client: redis.Redis, storage: BatchStorage
) -> None:
    upload = storage.files.begin()
    upload.write(DATA)
    assert pieces(client)
    assert all(0 < client.ttl(name) <= 3600 for name in pieces(client))
    upload.abandon()
    assert pieces(client) == []


def test_a_file_that_has_expired_is_gone_and_makes_room(
    client: redis.Redis, storage: BatchStorage
) -> None:
    upload = storage.files.begin()
    upload.write(DATA)
    file = upload.keep(ROOM, "in.jsonl", "batch", 1)
    eventually(lambda: not storage.files.page().items)
    with pytest.raises(UnknownFile):
        storage.files.get(file.id)
    one = FileLimits(max_files=1, max_bytes=40)
    eventually(lambda: has_room(storage, one))  # by whole seconds
    keep(storage, room=one)


def has_room(storage: BatchStorage, limits: FileLimits) -> bool:
    try:
        storage.files.require_room(limits)
    except FilesFull:
        return False
    return True


def test_a_batch_keeps_its_file_alive_behind_its_deadline(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    batch = ask(storage, file, window_s=9000)
    later = storage.files.get(file.id)
    assert later.expires_at > batch.expires_at > file.expires_at
    assert min(client.ttl(name) for name in pieces(client)) > 9000


def test_a_piece_that_is_lost_or_changed_is_said(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    client.set(pieces(client)[1], b"x" * 10)
    with pytest.raises(CorruptArtifact):
        list(storage.files.blocks(file))
    client.delete(pieces(client)[1])
    with pytest.raises(CorruptArtifact):
        list(storage.files.blocks(file))


def test_a_full_server_refuses_an_upload(client: redis.Redis, storage: BatchStorage) -> None:
    upload = storage.files.begin()
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        upload.write(DATA)
    upload.abandon()
