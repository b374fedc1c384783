"""Batches in a real Redis, from a worker's side: who holds one, what it may write, how it ends."""

import threading
import time

import pytest
import redis
from batch_requests import DATA, ROOM, ask, keep

from tasc_serve.http.batches.files_api import BatchStorage
from tasc_store import StoreError, keys
from tasc_store.batches.batch_store import LEFT_S, BatchFault
from tasc_store.batches.files import KEEP, FileStore, Upload
from tasc_store.batches.leases import BatchLease, BatchQueue, Counts, take_batch
from tasc_store.errors import BatchEnded, LeaseLost, UnknownBatch

pytestmark = pytest.mark.redis


@pytest.fixture
def storage(client: redis.Redis) -> BatchStorage:
    return BatchStorage(client)


def taken(client: redis.Redis, lease_s: float = 60.0) -> BatchLease:
    lease = take_batch(client, lease_s)
    assert lease
    return lease


def expire(client: redis.Redis, lease: BatchLease) -> None:
    """As if its worker had been silent for long."""
    (name,) = client.scan_iter(f"*:lease:{lease.batch.id}")
    client.delete(name)


def test_a_batch_is_held_by_one_worker_the_nearest_deadline_first(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    late, soon = ask(storage, file, window_s=100), ask(storage, file, window_s=50)
    assert [taken(client).batch.id for _ in range(2)] == [soon.id, late.id]
    assert take_batch(client, 60.0) is None


def test_of_many_workers_each_takes_another(client: redis.Redis, storage: BatchStorage) -> None:
    file = keep(storage)
    asked = {ask(storage, file).id for _ in range(20)}
    found: list[str] = []

    def work() -> None:
        while lease := take_batch(client, 60.0):
            found.append(lease.batch.id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == sorted(asked)


def test_a_worker_takes_batches_of_its_tasks_alone(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    assert take_batch(client, 60.0, ["tickets", "tags"]) is None
    assert take_batch(client, 60.0, ["tickets", "greet"])


def test_a_batch_given_back_is_taken_again_and_one_held_is_not(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    lease = taken(client)
    assert lease.renew() == "validating"
    assert take_batch(client, 60.0) is None
    lease.release()
    assert taken(client).batch.attempts == 1


def test_who_lost_a_batch_can_write_nothing_about_it(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    former = taken(client)
    expire(client, former)
    holder = taken(client)
    for write in (
        former.renew,
        lambda: former.tell(Counts(3), "in_progress"),
        lambda: former.finish("completed", Counts(3, 3), {}),
    ):
        with pytest.raises(LeaseLost):
            write()
    former.release()
    assert holder.renew() == "validating"
    assert storage.batches.get(holder.batch.id).total == 0


def test_a_lease_that_ran_out_is_taken_up_again_if_nobody_else_did(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    lease = taken(client)
    expire(client, lease)
    assert lease.renew() == "validating"
    assert take_batch(client, 60.0) is None


def test_whatever_its_worker_writes_takes_up_a_lease_that_ran_out(
    client: redis.Redis, storage: BatchStorage
) -> None:
    id_ = ask(storage, keep(storage)).id
    lease = taken(client)
    expire(client, lease)
    assert lease.tell(Counts(3), "in_progress") == "in_progress"
    assert take_batch(client, 60.0) is None
    expire(client, lease)
    lease.finish("completed", Counts(3, 3), {})
    assert storage.batches.get(id_).status == "completed"


def output(client: redis.Redis, text: bytes) -> Upload:
    upload = FileStore(client).begin()
    upload.write(text)
    return upload


def test_a_batch_ends_with_its_files_counts_and_times_at_once(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    id_ = ask(storage, file).id
    lease = taken(client)
    assert lease.tell(Counts(3), "in_progress") == "in_progress"
    assert lease.tell(Counts(3, 1, 0)) == "in_progress"
    assert storage.batches.get(id_).completed == 1
    assert lease.tell(Counts(3, 2, 1), "finalizing") == "finalizing"
    with pytest.raises(BatchEnded):
        storage.batches.cancel(id_)
    files = {
        "output_file_id": output(client, b"two").end("out.jsonl", "batch_output", 3600),
        "error_file_id": output(client, b"one").end("err.jsonl", "batch_output", 3600),
    }
    lease.finish("completed", Counts(3, 2, 1), files)
    batch = storage.batches.get(id_)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 3, 2, 1)
    assert set(batch.at) == {"in_progress", "finalizing", "completed"}
    assert batch.output_file_id
    assert batch.error_file_id
    written = storage.files.get(batch.output_file_id)
    assert b"".join(storage.files.blocks(written)) == b"two"
    assert written.purpose == "batch_output"
    assert take_batch(client, 60.0) is None
    storage.files.delete(file.id)  # nobody reads it any more
    with pytest.raises(LeaseLost):
        lease.finish("completed", Counts(3, 2, 1), {})


def test_a_file_that_lost_its_beginning_does_not_end_a_batch(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    lease = taken(client)
    upload = output(client, b"two")
    file = upload.end("out.jsonl", "batch_output", 3600)
    upload.abandon()
    with pytest.raises(StoreError):
        lease.finish("completed", Counts(1, 1), {"output_file_id": file})
    assert lease.renew() == "validating"


def test_a_running_batch_is_cancelled_by_its_worker(
    client: redis.Redis, storage: BatchStorage
) -> None:
    id_ = ask(storage, keep(storage)).id
    lease = taken(client)
    assert storage.batches.cancel(id_).status == "cancelling"
    assert lease.renew() == "cancelling"
    assert lease.tell(Counts(3), "in_progress") == "cancelling"
    assert lease.tell(Counts(3, 1), "finalizing") == "cancelling"
    lease.finish("cancelled", Counts(3, 1), {})
    assert storage.batches.get(id_).status == "cancelled"
    assert storage.batches.cancel(id_).status == "cancelled"


def test_a_failed_batch_says_why(client: redis.Redis, storage: BatchStorage) -> None:
    id_ = ask(storage, keep(storage)).id
    faults = (BatchFault("invalid_json_line", "line 2 is naïve", 2), BatchFault("x", "y"))
    taken(client).finish("failed", Counts(0), {}, faults)
    assert storage.batches.get(id_).errors == faults


def test_attempts_that_failed_or_were_killed_count_until_something_is_done(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    taken(client).release()  # ended by a person
    taken(client).release(failed=True)
    expire(client, taken(client))
    lease = taken(client)
    assert lease.batch.attempts == 3
    lease.tell(Counts(9, 1), "in_progress")
    lease.release(failed=True)
    assert taken(client).batch.attempts == 2


def test_what_redis_did_is_not_done_twice_where_its_reply_was_lost(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    limits = type(ROOM)(max_files=1, max_bytes=35)
    values = (0, limits.max_files, limits.max_bytes, file.to_json())
    again = client.register_script(KEEP)([keys.SHARED], values)
    assert int(again) == 1
    assert b"".join(storage.files.blocks(file)) == DATA


def test_an_ended_batch_is_forgotten_in_time(client: redis.Redis, storage: BatchStorage) -> None:
    id_ = ask(storage, keep(storage)).id
    storage.batches.cancel(id_)
    (name,) = client.scan_iter(f"*:batch:{id_}")
    assert 0 < client.ttl(name) <= 7200
    client.delete(name)
    assert storage.batches.page().items == ()
    with pytest.raises(UnknownBatch):
        storage.batches.get(id_)


def overdue(client: redis.Redis, lease: BatchLease, late_s: float) -> None:
    """As if it had been due so long ago."""
    (name,) = client.scan_iter("*:open")
    client.zadd(name, {lease.batch.id: time.time() - late_s})


def test_a_begun_batch_that_nobody_takes_up_any_more_expires_for_whoever_looks(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    for look in (storage.batches.get, lambda id_: storage.batches.page().items[0]):
        id_ = ask(storage, file).id
        lease = taken(client)
        lease.tell(Counts(3, 1), "in_progress")
        expire(client, lease)
        overdue(client, lease, LEFT_S - 60)
        assert look(id_).status == "in_progress", "a worker may write what is done"
        overdue(client, lease, LEFT_S + 1)
        found = look(id_)
        assert (found.status, found.completed) == ("expired", 1)
        assert found.at["expired"] >= found.at["in_progress"]
        for write in (lease.renew, lambda: lease.finish("expired", Counts(3, 1), {})):  # noqa: B023
            with pytest.raises(LeaseLost):
                write()
        assert take_batch(client, 60.0) is None
    storage.files.delete(file.id)


def test_a_worker_that_comes_back_in_time_ends_an_overdue_batch_with_its_answers(
    client: redis.Redis, storage: BatchStorage
) -> None:
    id_ = ask(storage, keep(storage)).id
    former = taken(client)
    former.tell(Counts(3, 1), "in_progress")
    expire(client, former)
    overdue(client, former, LEFT_S - 60)
    lease = taken(client)
    overdue(client, lease, 2 * LEFT_S)
    assert storage.batches.get(id_).status == "in_progress", "it is held"
    written = output(client, b"one").end("out.jsonl", "batch_output", 3600)
    lease.finish("expired", Counts(3, 1), {"output_file_id": written})
    assert storage.batches.get(id_).output_file_id == written.id


def test_a_batch_cancelled_behind_a_dead_worker_ends_without_one(
    client: redis.Redis, storage: BatchStorage
) -> None:
    file = keep(storage)
    first, id_ = ask(storage, file, window_s=50), ask(storage, file, window_s=60).id
    leases = [taken(client), taken(client)]
    leases[1].tell(Counts(3, 1), "in_progress")
    for lease in leases:
        expire(client, lease)
    assert storage.batches.cancel(id_).status == "cancelling"
    lease = taken(client)
    assert lease.batch.id == id_, "it is due before all others"
    assert lease.renew() == "cancelling"
    expire(client, lease)
    overdue(client, lease, LEFT_S + 1)
    found = storage.batches.get(id_)
    assert found.status == "cancelled"
    assert found.at["cancelled"] >= found.at["cancelling"]
    assert storage.batches.get(first.id).status == "validating"


def test_a_worker_leaves_batches_of_tasks_that_it_cannot_answer(
    client: redis.Redis, storage: BatchStorage
) -> None:
    ask(storage, keep(storage))
    assert take_batch(client, 60.0, leave=["greet", "tags"]) is None
    assert take_batch(client, 60.0, ["greet"], ["greet"]) is None
    assert take_batch(client, 60.0, ["greet"], ["tags"])


def test_batches_that_nobody_holds_wait_since_they_were_asked_for_or_let_go(
    client: redis.Redis, storage: BatchStorage
) -> None:
    queue = BatchQueue(client)
    assert queue.waiting() == {}
    ids = [ask(storage, keep(storage)).id for _ in range(3)]
    for id_, ago in zip(ids, (10, 500, 20), strict=True):
        (name,) = client.scan_iter(f"*:batch:{id_}")
        client.hset(name, "created_at", int(time.time()) - ago)
    (found,) = queue.waiting().values()
    assert (found.batches, round(found.oldest_s / 10)) == (3, 50)
    leases = [taken(client) for _ in ids]
    assert queue.waiting() == {}
    next(lease for lease in leases if lease.batch.id == ids[1]).release()
    assert queue.waiting()["greet"].oldest_s < 400
    storage.batches.cancel(ids[1])
    assert queue.waiting() == {}
