"""Files in a real Redis: the contract, their pieces, and what is left of uploads that break off."""

import pytest
import redis

from storage_contract import DATA, ROOM, StorageContract, ask, keep
from support import eventually
from tasc_serve.http.batches.batch_storage import RedisStorage
from tasc_store import CorruptArtifact, StoreFull, TaskRecord, TaskStore
from tasc_store.batches.batch_store import BatchStore
from tasc_store.batches.files import FileLimits, FileStore
from tasc_store.errors import FilesFull, UnknownFile

pytestmark = pytest.mark.redis


@pytest.fixture
def storage(client: redis.Redis) -> RedisStorage:
    record = TaskRecord(name="greet", model="m", fingerprint="f" * 32, template="{input}")
    TaskStore(client).put(record)
    found = RedisStorage(client)
    found.files = FileStore(client, chunk_bytes=10)
    found.batches = BatchStore(client)
    return found


class TestRedisStorage(StorageContract):
    pass


def pieces(client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter("*:data:*"))


def test_a_file_lies_in_pieces_that_go_away_with_it(
    client: redis.Redis, storage: RedisStorage
) -> None:
    file = keep(storage)
    names = pieces(client)
    assert [len(client.get(name)) for name in names] == [10, 10, 10, 5]
    assert all(0 < client.ttl(name) <= 3600 for name in names)
    storage.files.delete(file.id)
    assert pieces(client) == []
    assert storage.files.page().items == ()


def test_an_upload_that_breaks_off_leaves_nothing_for_long(
    client: redis.Redis, storage: RedisStorage
) -> None:
    upload = storage.files.begin()
    upload.write(DATA)
    assert pieces(client)
    assert all(0 < client.ttl(name) <= 3600 for name in pieces(client))
    upload.abandon()
    assert pieces(client) == []


def test_a_file_that_has_expired_is_gone_and_makes_room(
    client: redis.Redis, storage: RedisStorage
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


def has_room(storage: RedisStorage, limits: FileLimits) -> bool:
    try:
        storage.files.require_room(limits)
    except FilesFull:
        return False
    return True


def test_a_batch_keeps_its_file_alive_behind_its_deadline(
    client: redis.Redis, storage: RedisStorage
) -> None:
    file = keep(storage)
    batch = ask(storage, file, window_s=9000)
    later = storage.files.get(file.id)
    assert later.expires_at > batch.expires_at > file.expires_at
    assert min(client.ttl(name) for name in pieces(client)) > 9000


def test_a_piece_that_is_lost_or_changed_is_said(
    client: redis.Redis, storage: RedisStorage
) -> None:
    file = keep(storage)
    client.set(pieces(client)[1], b"x" * 10)
    with pytest.raises(CorruptArtifact, match="not what was uploaded"):
        list(storage.files.blocks(file))
    client.delete(pieces(client)[1])
    with pytest.raises(CorruptArtifact, match="piece 1"):
        list(storage.files.blocks(file))


def test_a_full_server_refuses_an_upload(client: redis.Redis, storage: RedisStorage) -> None:
    upload = storage.files.begin()
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        upload.write(DATA)
    upload.abandon()
