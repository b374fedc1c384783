"""Tests batches in a real Redis from a worker's side: leases, permitted writes, and ends."""

import threading
import time

import pytest
import redis
from batch_requests import Shelf

from tasc_store.batches.batch_store import LEFT_S
from tasc_store.batches.files import FileLimits
from tasc_store.batches.leases import Counts, take_batch, waiting_batches
from tasc_store.errors import BatchEnded, LeaseLost, UnknownBatch

pytestmark = pytest.mark.redis


def test_workers_take_the_batch_with_the_nearest_deadline(shelf: Shelf) -> None:
    late, soon = shelf.ask(window_s=100), shelf.ask(window_s=50)
    assert [shelf.taken().batch.id for _ in range(2)] == [soon.id, late.id]
    assert take_batch(shelf.client, 60.0) is None


def test_concurrent_workers_take_different_batches(shelf: Shelf) -> None:
    file = shelf.keep()
    asked = {shelf.ask(file).id for _ in range(20)}
    found: list[str] = []

    def work() -> None:
        while lease := take_batch(shelf.client, 60.0):
            found.append(lease.batch.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(asked)


@pytest.mark.parametrize(
    ("tasks", "leave", "takes"),
    [
        (["tickets", "tags"], [], False),
        (["tickets", "greet"], [], True),
        ([], ["greet", "tags"], False),
        (["greet"], ["greet"], False),
        (["greet"], ["tags"], True),
    ],
)
def test_worker_takes_only_batches_of_its_tasks(shelf, tasks, leave, takes) -> None:
    shelf.ask()
    assert bool(take_batch(shelf.client, 60.0, tasks, leave)) == takes


def test_worker_without_the_lease_cannot_write(shelf: Shelf) -> None:
    shelf.ask()
    former = shelf.taken()
    shelf.expire(former)
    holder = shelf.taken()
    for write in (
        former.renew,
        lambda: former.report(Counts(3), "in_progress"),
        lambda: former.finish("completed", Counts(3, 3), {}),
    ):
        with pytest.raises(LeaseLost):
            write()
    former.release()
    assert holder.renew() == "validating"
    assert shelf.batches.get(holder.batch.id).total == 0


def test_any_write_renews_an_expired_lease(shelf: Shelf) -> None:
    id_, lease = shelf.ask().id, shelf.taken()
    for write, status in (
        (lease.renew, "validating"),
        (lambda: lease.report(Counts(3), "in_progress"), "in_progress"),
    ):
        shelf.expire(lease)
        assert write() == status
        assert take_batch(shelf.client, 60.0) is None
    shelf.expire(lease)
    lease.finish("completed", Counts(3, 3), {})
    assert shelf.batches.get(id_).status == "completed"


def test_finishing_a_batch_sets_files_counts_and_times_together(shelf: Shelf) -> None:
    file = shelf.keep()
    id_, lease = shelf.ask(file).id, shelf.taken()
    assert lease.report(Counts(3), "in_progress") == "in_progress"
    assert lease.report(Counts(3, 1, 0)) == "in_progress"
    assert shelf.batches.get(id_).completed == 1
    assert lease.report(Counts(3, 2, 1), "finalizing") == "finalizing"
    with pytest.raises(BatchEnded):
        shelf.batches.cancel(id_)
    files = {"output_file_id": shelf.output(b"two"), "error_file_id": shelf.output(b"one")}
    lease.finish("completed", Counts(3, 2, 1), files)
    batch = shelf.batches.get(id_)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 3, 2, 1)
    assert set(batch.at) == {"in_progress", "finalizing", "completed"}
    for found, text in ((batch.output_file_id, b"two"), (batch.error_file_id, b"one")):
        assert found
        written = shelf.files.get(found)
        assert (b"".join(shelf.files.blocks(written)), written.purpose) == (text, "batch_output")
    assert take_batch(shelf.client, 60.0) is None
    shelf.files.delete(file.id)  # it is no longer read
    with pytest.raises(LeaseLost):
        lease.finish("completed", Counts(3, 2, 1), {})


def test_running_batch_is_cancelled_by_its_worker(shelf: Shelf) -> None:
    id_, lease = shelf.ask().id, shelf.taken()
    assert shelf.batches.cancel(id_).status == "cancelling"
    assert lease.renew() == "cancelling"
    assert lease.report(Counts(3), "in_progress") == "cancelling"
    assert lease.report(Counts(3, 1), "finalizing") == "cancelling"
    lease.finish("cancelled", Counts(3, 1), {})
    assert shelf.batches.get(id_).status == "cancelled"
    assert shelf.batches.cancel(id_).status == "cancelled"


def test_failed_and_killed_attempts_are_counted_until_lines_are_answered(shelf: Shelf) -> None:
    shelf.ask()
    shelf.taken().release()  # ended by a person
    shelf.taken().release(failed=True)
    shelf.expire(shelf.taken())
    lease = shelf.taken()
    assert lease.batch.attempts == 3
    lease.report(Counts(9, 1), "in_progress")
    lease.release(failed=True)
    assert shelf.taken().batch.attempts == 2


def test_file_record_may_be_added_again_after_a_lost_reply(shelf: Shelf) -> None:
    file = shelf.keep()
    shelf.files.add(file, FileLimits(max_files=0, max_bytes=1))
    assert shelf.files.page().items == (file,)


def test_ended_batch_expires(shelf: Shelf) -> None:
    id_ = shelf.ask().id
    shelf.batches.cancel(id_)
    (name,) = shelf.client.scan_iter(f"*:batch:{id_}")
    assert 0 < shelf.client.ttl(name) <= 7200
    shelf.client.delete(name)
    assert shelf.batches.page().items == ()
    with pytest.raises(UnknownBatch):
        shelf.batches.get(id_)


def test_reading_an_abandoned_batch_expires_the_batch(shelf: Shelf) -> None:
    file = shelf.keep()
    for look in (shelf.batches.get, lambda id_: shelf.batches.page().items[0]):
        id_, lease = shelf.ask(file).id, shelf.taken()
        lease.report(Counts(3, 1), "in_progress")
        shelf.expire(lease)
        shelf.overdue(lease, LEFT_S - 60)
        assert look(id_).status == "in_progress", "a worker may write what is done"
        shelf.overdue(lease, LEFT_S + 1)
        found = look(id_)
        assert (found.status, found.completed) == ("expired", 1)
        assert found.at["expired"] >= found.at["in_progress"]
        for write in (lease.renew, lambda: lease.finish("expired", Counts(3, 1), {})):  # noqa: B023
            with pytest.raises(LeaseLost):
                write()
        assert take_batch(shelf.client, 60.0) is None
    shelf.files.delete(file.id)


def test_returning_worker_ends_an_overdue_batch_with_its_answers(shelf: Shelf) -> None:
    id_, former = shelf.ask().id, shelf.taken()
    former.report(Counts(3, 1), "in_progress")
    shelf.expire(former)
    shelf.overdue(former, LEFT_S - 60)
    lease = shelf.taken()
    shelf.overdue(lease, 2 * LEFT_S)
    assert shelf.batches.get(id_).status == "in_progress", "it is held"
    written = shelf.output(b"one")
    lease.finish("expired", Counts(3, 1), {"output_file_id": written})
    assert shelf.batches.get(id_).output_file_id == written.id


def test_cancelled_batch_of_a_dead_worker_ends_without_a_worker(shelf: Shelf) -> None:
    first, id_ = shelf.ask(window_s=50), shelf.ask(window_s=60).id
    leases = [shelf.taken(), shelf.taken()]
    leases[1].report(Counts(3, 1), "in_progress")
    for lease in leases:
        shelf.expire(lease)
    assert shelf.batches.cancel(id_).status == "cancelling"
    lease = shelf.taken()
    assert lease.batch.id == id_, "it is due before all others"
    assert lease.renew() == "cancelling"
    shelf.expire(lease)
    shelf.overdue(lease, LEFT_S + 1)
    found = shelf.batches.get(id_)
    assert found.status == "cancelled"
    assert found.at["cancelled"] >= found.at["cancelling"]
    assert shelf.batches.get(first.id).status == "validating"


def test_batch_waiting_time_counts_from_creation_or_release(
    client: redis.Redis, shelf: Shelf
) -> None:
    assert waiting_batches(client) == {}
    ids = [shelf.ask().id for _ in range(3)]
    for id_, ago in zip(ids, (10, 500, 20), strict=True):
        (name,) = client.scan_iter(f"*:batch:{id_}")
        client.hset(name, "created_at", int(time.time()) - ago)
    (found,) = waiting_batches(client).values()
    assert (found.batches, round(found.oldest_s / 10)) == (3, 50)
    leases = [shelf.taken() for _ in ids]
    assert waiting_batches(client) == {}
    next(lease for lease in leases if lease.batch.id == ids[1]).release()
    assert waiting_batches(client)["greet"].oldest_s < 400
    shelf.batches.cancel(ids[1])
    assert waiting_batches(client) == {}
