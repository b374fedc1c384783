"""Tests files on a file system and batches in a real Redis: limits, expiry, left-over bytes."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from batch_requests import DATA, ROOM, Shelf

from support import refused
from tasc_store import CorruptArtifact, StoreError, StoreFull
from tasc_store.batches.files import FileLimits, FileStore
from tasc_store.errors import (
    BatchesFull,
    FileInUse,
    FilesFull,
    FilesNotShared,
    LinesFull,
    UnknownFile,
)

pytestmark = pytest.mark.redis


def test_number_and_total_size_of_files_are_limited(shelf: Shelf) -> None:
    shelf.files.require_room(ROOM)
    shelf.keep()
    shelf.files.require_room(ROOM)
    for room in (FileLimits(1, 10_000), FileLimits(100, 60)):
        with pytest.raises(FilesFull):
            shelf.keep(room=room)
    with pytest.raises(FilesFull):
        shelf.files.require_room(FileLimits(1, 10_000))
    assert len(shelf.files.page().items) == 1


def test_one_owner_may_have_at_most_half_of_the_files_and_batches(shelf: Shelf) -> None:
    few, small = FileLimits(4, 10_000), FileLimits(100, 4 * len(DATA))
    first = shelf.keep(room=FileLimits(1, len(DATA)), owner="ann")
    shelf.keep(room=small, owner="ann")
    for room in (few, small):
        with pytest.raises(FilesFull):
            shelf.keep(room=room, owner="ann")
        with pytest.raises(FilesFull):
            shelf.files.require_room(room, "ann")
        shelf.files.require_room(room, "bob")
        shelf.files.require_room(room)
    shelf.keep(room=few, owner="bob")
    shelf.files.delete(first.id)
    shelf.keep(room=few, owner="ann")
    hers, his = shelf.keep(owner="ann"), shelf.keep(owner="bob")
    for _ in range(2):
        shelf.ask(hers, most=4)
    with pytest.raises(BatchesFull):
        shelf.ask(hers, most=4)
    for _ in range(2):
        shelf.ask(his, most=4)


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"a\n", 1), (b"a", 1), (b"a\n\nb\n", 3), (b"123456\n123456\n12", 3), (b"\n", 1)],
)
def test_file_record_has_the_number_of_lines(shelf: Shelf, data: bytes, count: int) -> None:
    assert shelf.files.get(shelf.keep(data).id).lines == count


def test_open_batch_lines_per_owner_are_limited(shelf: Shelf) -> None:
    hers, his = shelf.keep(b"a\nb\n", owner="ann"), shelf.keep(b"a\n", owner="bob")
    first = shelf.ask(hers, most_lines=5)
    shelf.ask(hers, most_lines=5)
    with pytest.raises(LinesFull):
        shelf.ask(hers, most_lines=5)
    assert len(shelf.batches.page().items) == 2
    shelf.ask(his, most_lines=5)
    shelf.batches.cancel(first.id)
    shelf.ask(hers, most_lines=5)
    with pytest.raises(LinesFull):
        shelf.ask(his, most_lines=1)


def test_file_list_pages_have_each_file_once_after_a_deletion(shelf: Shelf) -> None:
    ids = []
    for i in range(7):
        ids.append(shelf.keep(owner="ann" if i % 2 else "bob").id)
        time.sleep(0.002)
    first = shelf.files.page(limit=3, oldest_first=True)
    assert [f.id for f in first.items] == ids[:3]
    assert first.has_more
    shelf.files.delete(ids[2])
    rest = shelf.files.page(after=ids[2], limit=4, oldest_first=True)
    assert ([f.id for f in rest.items], rest.has_more) == (ids[3:], False)
    newest = shelf.files.page(limit=2, wanted=lambda f: f.owner == "ann")
    assert ([f.id for f in newest.items], newest.has_more) == ([ids[5], ids[3]], True)


def test_file_of_an_open_batch_cannot_be_deleted(shelf: Shelf) -> None:
    gone, file = shelf.keep(), shelf.keep()
    shelf.files.delete(gone.id)
    with pytest.raises(UnknownFile):
        shelf.ask(gone)
    for batch in [shelf.ask(file) for _ in range(2)]:
        with pytest.raises(FileInUse):
            shelf.files.delete(file.id)
        shelf.batches.cancel(batch.id)
    shelf.files.delete(file.id)


def test_unstarted_batch_is_cancelled_at_once_or_expires(shelf: Shelf) -> None:
    batch, file = shelf.ask(), shelf.keep()
    cancelled = shelf.batches.cancel(batch.id)
    assert (cancelled.status, set(cancelled.at)) == ("cancelled", {"cancelling", "cancelled"})
    assert shelf.batches.cancel(batch.id) == cancelled
    assert shelf.batches.get(shelf.ask(file, window_s=0).id).status == "expired"
    shelf.files.delete(file.id)


def test_bytes_are_removed_with_a_file_or_an_abandoned_upload(shelf: Shelf) -> None:
    file = shelf.keep()
    assert shelf.stored == {file.id: DATA}
    shelf.files.delete(file.id)
    upload = shelf.files.begin()
    upload.write(DATA)
    assert list(shelf.stored) == [upload.id]
    assert shelf.files.page().items == ()
    upload.abandon()
    upload.write(b"late")
    assert shelf.stored == {}


def test_cleanup_removes_only_expired_files_and_unfinished_uploads(shelf, monkeypatch) -> None:
    kept, expired = shelf.keep(ttl_s=9000), shelf.keep(ttl_s=60)
    half = shelf.files.begin()
    half.write(DATA)
    shelf.files.clean()
    assert shelf.stored.keys() == {kept.id, expired.id, half.id}
    later = time.time() + 4000
    monkeypatch.setattr(time, "time", lambda: later)
    new = shelf.files.begin()
    new.write(DATA)
    shelf.files.clean()
    assert shelf.stored.keys() == {kept.id, new.id}
    with pytest.raises(StoreError):
        half.keep(ROOM, "late", "batch", 3600)
    assert [file.id for file in shelf.files.page().items] == [kept.id]
    new.keep(ROOM, "in time", "batch", 3600)
    shelf.files.require_shared()


def test_expired_file_is_removed_and_frees_its_quota(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = FileLimits(max_files=1, max_bytes=40)
    file = shelf.keep(ttl_s=60, room=one)
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert shelf.files.page().items == ()
    for use in (shelf.files.get, shelf.files.delete):
        with pytest.raises(UnknownFile):
            use(file.id)
    with pytest.raises(UnknownFile):
        shelf.ask(file)
    shelf.files.require_room(one)
    shelf.keep(room=one)


def test_batch_keeps_its_file_until_after_its_deadline(shelf: Shelf) -> None:
    file = shelf.keep()
    batch = shelf.ask(file, window_s=9000)
    assert shelf.files.get(file.id).expires_at > batch.expires_at > file.expires_at


def test_changed_or_missing_bytes_are_reported(shelf: Shelf) -> None:
    file = shelf.keep()
    (path,) = shelf.folder.glob("*/file-*")
    path.write_bytes(b"x" * len(DATA))
    with pytest.raises(CorruptArtifact):
        list(shelf.files.blocks(file))
    path.unlink()
    for read in (shelf.files.blocks, lambda file: shelf.files.head(file, 5)):
        with pytest.raises(CorruptArtifact):
            list(read(file))


def test_full_disk_refuses_an_upload(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf.files, "open", lambda id_, mode: Path("/dev/full").open(mode))  # noqa: SIM115
    with pytest.raises(StoreFull):
        shelf.keep()
    assert shelf.files.page().items == ()


def test_concurrent_uploads_do_not_exceed_the_limit(shelf: Shelf) -> None:
    def keep(i: int) -> bool:
        try:
            shelf.keep(room=FileLimits(3, 10_000))
        except FilesFull:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(keep, range(8))) == 3
    assert {file.id for file in shelf.files.page().items} == shelf.stored.keys()


def test_process_with_another_folder_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    shelf.files.require_shared()
    FileStore(shelf.client, f"file://{shelf.folder}").require_shared()
    other = FileStore(shelf.client, str(tmp_path / "other"))
    with refused(FilesNotShared, str(tmp_path / "other"), str(shelf.folder), "files_url"):
        other.require_shared()
    with pytest.raises(FilesNotShared):
        other.begin().write(DATA)
    file = shelf.keep()
    shelf.folder.rename(tmp_path / "moved")
    FileStore(shelf.client, str(tmp_path / "moved")).get(file.id)
    with pytest.raises(FilesNotShared):
        FileStore(shelf.client, str(shelf.folder)).require_shared()


def test_stores_of_two_redis_servers_may_have_one_folder(shelf: Shelf, redis_url: str) -> None:
    file = shelf.keep()
    with redis.Redis.from_url(redis_url.removesuffix("/0") + "/1") as client:
        other = FileStore(client, str(shelf.folder))
        other.require_shared()
        other.clean()
        assert other.page().items == ()
    assert b"".join(shelf.files.blocks(file)) == DATA


def test_folder_accepts_files_after_redis_lost_its_data(shelf: Shelf) -> None:
    shelf.keep()
    shelf.client.flushdb()
    file = shelf.keep()
    assert b"".join(FileStore(shelf.client, str(shelf.folder)).blocks(file)) == DATA


def test_bucket_stores_files_like_a_folder(client, monkeypatch) -> None:
    files = FileStore(client, "memory://bucket/files")
    upload, half = files.begin(), files.begin()
    for each in (upload, half):
        each.write(DATA)
    file = upload.keep(ROOM, "in.jsonl", "batch", 9000)
    assert b"".join(files.blocks(file)) == DATA
    assert files.head(file, 5) == DATA[:5]
    later = time.time() + 4000
    monkeypatch.setattr(time, "time", lambda: later)
    files.clean()
    assert (files.size_of(file.id), files.size_of(half.id)) == (len(DATA), 0)
    files.delete(file.id)
    assert files.size_of(file.id) == 0


def test_error_of_an_unknown_url_scheme_names_the_setting(client: redis.Redis) -> None:
    with refused(StoreError, "nosuch://", "files_url"):
        FileStore(client, "nosuch://bucket").require_shared()
