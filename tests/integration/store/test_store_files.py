"""Tests files and batches in a real Redis: kept, refused and left-over ones."""

import time

import pytest
from batch_requests import DATA, ROOM, Shelf

from support import eventually, refused
from tasc_store import CorruptArtifact, StoreFull
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


def test_a_file_comes_back_as_it_went_in(shelf: Shelf) -> None:
    file = shelf.keep(owner="ann")
    assert shelf.files.get(file.id) == file
    assert (file.filename, file.size_bytes, file.owner) == ("naïve 東京.jsonl", 35, "ann")
    assert file.expires_at == file.created_at + 3600
    assert b"".join(shelf.files.blocks(file)) == DATA
    assert shelf.files.head(file, 5) == DATA[:5]


def test_what_is_not_there_is_said(shelf: Shelf) -> None:
    with refused(ValueError, "empty"):
        shelf.keep(b"")
    assert shelf.files.page().items == ()
    for use in (shelf.files.get, shelf.files.delete):
        with pytest.raises(UnknownFile):
            use("file-1")
    for use in (shelf.batches.get, shelf.batches.cancel):
        with pytest.raises(UnknownBatch):
            use("batch-1")


def test_files_are_bounded_in_number_and_together(shelf: Shelf) -> None:
    shelf.files.require_room(ROOM)
    shelf.keep()
    shelf.files.require_room(ROOM)
    for room in (FileLimits(1, 10_000), FileLimits(100, 60)):
        with pytest.raises(FilesFull):
            shelf.keep(room=room)
    with pytest.raises(FilesFull):
        shelf.files.require_room(FileLimits(1, 10_000))
    assert len(shelf.files.page().items) == 1


def test_one_owner_leaves_half_of_the_room_for_files_and_batches_to_others(shelf: Shelf) -> None:
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
def test_a_file_knows_how_many_lines_it_has(shelf: Shelf, data: bytes, count: int) -> None:
    assert shelf.files.get(shelf.keep(data).id).lines == count


def test_lines_of_one_owners_batches_are_bounded_until_they_end(shelf: Shelf) -> None:
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


def test_pages_have_each_file_once_also_when_the_last_one_seen_is_deleted(shelf: Shelf) -> None:
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


def test_a_batch_begins_with_all_that_was_said(shelf: Shelf) -> None:
    file = shelf.keep(owner="ann")
    batch = shelf.ask(file)
    assert shelf.batches.get(batch.id) == batch
    begun = (batch.status, batch.endpoint, batch.window)
    assert begun == ("validating", "/v1/completions", "24h")
    assert batch.metadata == {"why": "naïve 東京"}
    assert (batch.model, batch.owner, batch.input_file_id) == ("greet", "ann", file.id)
    assert batch.expires_at == batch.created_at + 60
    assert (batch.total, batch.completed, batch.failed, batch.at) == (0, 0, 0, {})


def test_a_batch_needs_a_place_and_its_file_which_stays_as_long(shelf: Shelf) -> None:
    file = shelf.keep()
    batch = shelf.ask(file)
    with pytest.raises(BatchesFull):
        shelf.ask(file, most=1)
    gone = shelf.keep()
    shelf.files.delete(gone.id)
    with pytest.raises(UnknownFile):
        shelf.ask(gone)
    assert shelf.batches.page().items == (batch,)
    file = shelf.keep()
    for batch in [shelf.ask(file) for _ in range(2)]:
        with pytest.raises(FileInUse):
            shelf.files.delete(file.id)
        shelf.batches.cancel(batch.id)
    shelf.files.delete(file.id)


def test_a_batch_that_nobody_began_is_cancelled_at_once_or_expires(shelf: Shelf) -> None:
    batch, file = shelf.ask(), shelf.keep()
    cancelled = shelf.batches.cancel(batch.id)
    assert (cancelled.status, set(cancelled.at)) == ("cancelled", {"cancelling", "cancelled"})
    assert shelf.batches.cancel(batch.id) == cancelled
    assert shelf.batches.get(shelf.ask(file, window_s=0).id).status == "expired"
    shelf.files.delete(file.id)


def pieces(shelf: Shelf) -> list[bytes]:
    return sorted(shelf.client.scan_iter("*:data:*"))


def test_a_file_lies_in_pieces_that_go_away_with_it_or_with_its_upload(shelf: Shelf) -> None:
    file = shelf.keep()
    assert [len(shelf.client.get(name)) for name in pieces(shelf)] == [10, 10, 10, 5]
    assert all(0 < shelf.client.ttl(name) <= 3600 for name in pieces(shelf))
    shelf.files.delete(file.id)
    assert (pieces(shelf), shelf.files.page().items) == ([], ())
    upload = shelf.files.begin()
    upload.write(DATA)
    assert pieces(shelf)
    assert all(0 < shelf.client.ttl(name) <= 3600 for name in pieces(shelf))
    upload.abandon()
    assert pieces(shelf) == []


def test_a_file_that_has_expired_is_gone_and_makes_room(shelf: Shelf) -> None:
    file = shelf.keep(ttl_s=1)
    eventually(lambda: not shelf.files.page().items)
    with pytest.raises(UnknownFile):
        shelf.files.get(file.id)
    one = FileLimits(max_files=1, max_bytes=40)
    eventually(lambda: has_room(shelf, one))  # by whole seconds
    shelf.keep(room=one)


def has_room(shelf: Shelf, limits: FileLimits) -> bool:
    try:
        shelf.files.require_room(limits)
    except FilesFull:
        return False
    return True


def test_a_batch_keeps_its_file_alive_behind_its_deadline(shelf: Shelf) -> None:
    file = shelf.keep()
    batch = shelf.ask(file, window_s=9000)
    later = shelf.files.get(file.id)
    assert later.expires_at > batch.expires_at > file.expires_at
    assert min(shelf.client.ttl(name) for name in pieces(shelf)) > 9000


def test_a_piece_that_is_lost_or_changed_is_said(shelf: Shelf) -> None:
    file, (_, second, *_) = shelf.keep(), pieces(shelf)
    shelf.client.set(second, b"x" * 10)
    with pytest.raises(CorruptArtifact):
        list(shelf.files.blocks(file))
    shelf.client.delete(second)
    with pytest.raises(CorruptArtifact):
        list(shelf.files.blocks(file))


def test_a_full_server_refuses_an_upload(shelf: Shelf) -> None:
    upload = shelf.files.begin()
    shelf.client.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        upload.write(DATA)
    upload.abandon()
