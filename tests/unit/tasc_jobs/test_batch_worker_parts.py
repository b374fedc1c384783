"""A worker's parts: what it counts, what its lease hears of, which tasks it leaves alone."""

import threading
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from support import FakeClock, eventually
from tasc_jobs.batch.work import JobProgress
from tasc_jobs.errors import ClusterError
from tasc_jobs.worker.batch_worker import Counting, TaskBackoff
from tasc_jobs.worker.one_batch import HeldLease
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_store import StoreUnreachable
from tasc_store.batches.leases import Counts
from tasc_store.errors import LeaseLost


class Counted:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = BatchMetrics(self.registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tasc_batch_{name}", {"task": "t", **labels})

    @property
    def requests(self) -> tuple[float | None, float | None, float | None]:
        completed = self("requests_total", result="completed")
        return completed, self("requests_total", result="failed"), self("tokens_total")


def progress(done: int, errors: int, tokens: int, running: int = 3) -> JobProgress:
    return JobProgress(done, 0, None, errors, tokens, 1, 1, running)


def test_what_earlier_starts_did_is_not_counted_again() -> None:
    counted = Counted()
    with Counting(counted.metrics, "t") as counting:
        assert counted.requests == (0, 0, 0)
        for told in ((100, 10, 500), (100, 10, 500), (104, 11, 520), (110, 11, 560)):
            counting.told(progress(*told))
        assert counted.requests == (9, 1, 60)
        assert (counted("in_progress"), counted("rows_running")) == (1, 3)
    assert (counted("in_progress"), counted("rows_running")) == (0, 0)


def test_a_job_that_begins_anew_takes_nothing_back_and_counts_on() -> None:
    counted = Counted()
    with Counting(counted.metrics, "t") as counting:
        for told in ((0, 0, 0), (8, 2, 80), (0, 0, 0), (5, 1, 50)):
            counting.told(progress(*told))
    assert counted.requests == (6 + 4, 2 + 1, 130)


class FakeLease:
    """Says what the script has, the last of it for ever."""

    seconds = 0.01

    def __init__(self, *script: str | Exception, expires_in: float = 3600) -> None:
        self.batch = SimpleNamespace(id="batch-1", expires_at=time.time() + expires_in)
        self.script = list(script)
        self.renewed = 0

    def renew(self) -> str:
        self.renewed += 1
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(said, Exception):
            raise said
        return said

    def tell(self, counts: Counts, status: str | None = None) -> str:
        return self.renew()


def test_a_lease_is_renewed_for_the_time_of_the_block_alone() -> None:
    lease = FakeLease("in_progress")
    with HeldLease(lease) as hold:
        eventually(lambda: lease.renewed > 5)
        assert hold.stop is None
        assert threads_of_leases() == 1
    assert threads_of_leases() == 0


def threads_of_leases() -> int:
    return [thread.name for thread in threading.enumerate()].count("batch-lease")


def test_a_cancelled_an_expired_and_a_lost_batch_are_heard_of() -> None:
    away = StoreUnreachable("away")
    for lease, stop in (
        (FakeLease("in_progress", away, "cancelling"), "cancelled"),
        (FakeLease("in_progress", expires_in=0.05), "expired"),
        (FakeLease(away, LeaseLost("another's")), "lost"),
        (FakeLease("cancelling", LeaseLost("another's")), "lost"),
    ):
        with HeldLease(lease) as hold:
            eventually(lambda hold=hold, stop=stop: hold.stop == stop)
            assert hold.stopped


def test_what_is_told_while_redis_is_away_is_told_again() -> None:
    hold = HeldLease(FakeLease(StoreUnreachable("away"), "in_progress", LeaseLost("another's")))
    hold.tell(Counts(3))
    hold.tell(Counts(3, 1))
    assert hold.stop is None
    hold.tell(Counts(3, 2))
    assert hold.stop == "lost"


def test_a_task_is_paused_twice_as_long_at_each_fault_and_a_minute_at_most() -> None:
    clock = FakeClock()
    backoff = TaskBackoff(10, 5.0, clock)
    pauses = []
    for _ in range(6):
        pauses.append(backoff.failed("a", "why"))
        assert backoff.paused == ["a"]
        clock.now += pauses[-1]
        assert backoff.paused == []
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_one_task_that_works_keeps_the_worker_and_leaves_the_others_paused() -> None:
    clock = FakeClock()
    backoff = TaskBackoff(3, 5.0, clock)
    pauses = []
    for _ in range(5):
        pauses.append(backoff.failed("a", "why"))
        backoff.failed("b", "why")
        backoff.worked("b")
        assert backoff.paused[0] == "a"
        clock.now += 100
    assert pauses == [5, 10, 20, 40, 60]


def test_so_many_faults_in_a_row_are_too_many_whatever_their_tasks() -> None:
    backoff = TaskBackoff(3, 5.0, FakeClock())
    backoff.failed("a", "why")
    backoff.failed("b", "why")
    with pytest.raises(ClusterError):
        backoff.failed("c", "no disk")
