"""Tests batches in a real Redis from a worker's side: leases, permitted writes, and ends."""

import threading
import time

import pytest
import redis
from batch_requests import Shelf

from tasc_store.batches.batch_store import LEFT_S, BatchFault
from tasc_store.batches.files import FileLimits
from tasc_store.batches.leases import BatchQueue, Counts, take_batch
from tasc_store.errors import BatchEnded, LeaseLost, UnknownBatch

pytestmark = pytest.mark.redis


def test_a_batch_is_held_by_one_worker_the_nearest_deadline_first(shelf: Shelf) -> None:
    late, soon = shelf.ask(window_s=100), shelf.ask(window_s=50)
    assert [shelf.taken().batch.id for _ in range(2)] == [soon.id, late.id]
    assert take_batch(shelf.client, 60.0) is None


def test_of_many_workers_each_takes_another(shelf: Shelf) -> None:
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
def test_a_worker_takes_batches_of_tasks_that_it_answers_alone(
    shelf: Shelf, tasks: list[str], leave: list[str], takes: bool
) -> None:
    shelf.ask()
    assert bool(take_batch(shelf.client, 60.0, tasks, leave)) == takes


def test_who_lost_a_batch_can_write_nothing_about_it(shelf: Shelf) -> None:
    shelf.ask()
    former = shelf.taken()
    shelf.expire(former)
    holder = shelf.taken()
    for write in (
        former.renew,
        lambda: former.tell(Counts(3), "in_progress"),
        lambda: former.finish("completed", Counts(3, 3), {}),
    ):
        with pytest.raises(LeaseLost):
            write()
    former.release()
    assert holder.renew() == "validating"
    assert shelf.batches.get(holder.batch.id).total == 0


def test_whatever_its_worker_writes_takes_up_a_lease_that_ran_out(shelf: Shelf) -> None:
    id_, lease = shelf.ask().id, shelf.taken()
    for write, status in (
        (lease.renew, "validating"),
        (lambda: lease.tell(Counts(3), "in_progress"), "in_progress"),
    ):
        shelf.expire(lease)
        assert write() == status
        assert take_batch(shelf.client, 60.0) is None
    shelf.expire(lease)
    lease.finish("completed", Counts(3, 3), {})
    assert shelf.batches.get(id_).status == "completed"


def test_a_batch_ends_with_its_files_counts_and_times_at_once(shelf: Shelf) -> None:
    file = shelf.keep()
    id_, lease = shelf.ask(file).id, shelf.taken()
    assert lease.tell(Counts(3), "in_progress") == "in_progress"
    assert lease.tell(Counts(3, 1, 0)) == "in_progress"
    assert shelf.batches.get(id_).completed == 1
    assert lease.tell(Counts(3, 2, 1), "finalizing") == "finalizing"
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


def test_a_running_batch_is_cancelled_by_its_worker(shelf: Shelf) -> None:
    id_, lease = shelf.ask().id, shelf.taken()
    assert shelf.batches.cancel(id_).status == "cancelling"
    assert lease.renew() == "cancelling"
    assert lease.tell(Counts(3), "in_progress") == "cancelling"
    assert lease.tell(Counts(3, 1), "finalizing") == "cancelling"
    lease.finish("cancelled", Counts(3, 1), {})
    assert shelf.batches.get(id_).status == "cancelled"
    assert shelf.batches.cancel(id_).status == "cancelled"


def test_a_failed_batch_says_why(shelf: Shelf) -> None:
    id_ = shelf.ask().id
    faults = (BatchFault("invalid_json_line", "line 2 is naïve", 2), BatchFault("x", "y"))
    shelf.taken().finish("failed", Counts(0), {}, faults)
    assert shelf.batches.get(id_).errors == faults


def test_attempts_that_failed_or_were_killed_count_until_something_is_done(shelf: Shelf) -> None:
    shelf.ask()
    shelf.taken().release()  # ended by a person
    shelf.taken().release(failed=True)
    shelf.expire(shelf.taken())
    lease = shelf.taken()
    assert lease.batch.attempts == 3
    lease.tell(Counts(9, 1), "in_progress")
    lease.release(failed=True)
    assert shelf.taken().batch.attempts == 2


def test_record_of_a_file_may_be_added_again_after_a_lost_reply(shelf: Shelf) -> None:
    file = shelf.keep()
    shelf.files.add(file, FileLimits(max_files=0, max_bytes=1))
    assert shelf.files.page().items == (file,)


def test_an_ended_batch_is_forgotten_in_time(shelf: Shelf) -> None:
    id_ = shelf.ask().id
    shelf.batches.cancel(id_)
    (name,) = shelf.client.scan_iter(f"*:batch:{id_}")
    assert 0 < shelf.client.ttl(name) <= 7200
    shelf.client.delete(name)
    assert shelf.batches.page().items == ()
    with pytest.raises(UnknownBatch):
        shelf.batches.get(id_)


def test_a_begun_batch_that_nobody_takes_up_expires_for_whoever_looks(shelf: Shelf) -> None:
    file = shelf.keep()
    for look in (shelf.batches.get, lambda id_: shelf.batches.page().items[0]):
        id_, lease = shelf.ask(file).id, shelf.taken()
        lease.tell(Counts(3, 1), "in_progress")
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


def test_a_worker_that_comes_back_ends_an_overdue_batch_with_its_answers(shelf: Shelf) -> None:
    id_, former = shelf.ask().id, shelf.taken()
    former.tell(Counts(3, 1), "in_progress")
    shelf.expire(former)
    shelf.overdue(former, LEFT_S - 60)
    lease = shelf.taken()
    shelf.overdue(lease, 2 * LEFT_S)
    assert shelf.batches.get(id_).status == "in_progress", "it is held"
    written = shelf.output(b"one")
    lease.finish("expired", Counts(3, 1), {"output_file_id": written})
    assert shelf.batches.get(id_).output_file_id == written.id


def test_a_batch_cancelled_behind_a_dead_worker_ends_without_one(shelf: Shelf) -> None:
    first, id_ = shelf.ask(window_s=50), shelf.ask(window_s=60).id
    leases = [shelf.taken(), shelf.taken()]
    leases[1].tell(Counts(3, 1), "in_progress")
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


def test_batches_wait_since_they_were_asked_for_or_freed(client: redis.Redis, shelf: Shelf) -> None:
    queue = BatchQueue(client)
    assert queue.waiting() == {}
    ids = [shelf.ask().id for _ in range(3)]
    for id_, ago in zip(ids, (10, 500, 20), strict=True):
        (name,) = client.scan_iter(f"*:batch:{id_}")
        client.hset(name, "created_at", int(time.time()) - ago)
    (found,) = queue.waiting().values()
    assert (found.batches, round(found.oldest_s / 10)) == (3, 50)
    leases = [shelf.taken() for _ in ids]
    assert queue.waiting() == {}
    next(lease for lease in leases if lease.batch.id == ids[1]).release()
    assert queue.waiting()["greet"].oldest_s < 400
    shelf.batches.cancel(ids[1])
    assert queue.waiting() == {}
