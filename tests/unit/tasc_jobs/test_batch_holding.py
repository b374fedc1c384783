"""A worker's hold on a batch hears of whatever should stop it, and of nothing else."""

import time
from collections.abc import Callable
from types import SimpleNamespace

from tasc_jobs.worker.holding import Hold
from tasc_store import StoreUnreachable
from tasc_store.batch_leases import Counts
from tasc_store.errors import LeaseLost


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


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_lease_is_renewed_for_the_time_of_the_block_alone() -> None:
    lease = FakeLease("in_progress")
    with Hold(lease) as hold:
        wait_for(lambda: lease.renewed > 5)
        assert hold.stop is None
    renewed = lease.renewed
    time.sleep(0.05)
    assert lease.renewed == renewed


def test_a_cancelled_an_expired_and_a_lost_batch_are_heard_of() -> None:
    away = StoreUnreachable("away")
    for lease, stop in (
        (FakeLease("in_progress", away, "cancelling"), "cancelled"),
        (FakeLease("in_progress", expires_in=0.05), "expired"),
        (FakeLease(away, LeaseLost("another's")), "lost"),
        (FakeLease("cancelling", LeaseLost("another's")), "lost"),
    ):
        with Hold(lease) as hold:
            wait_for(lambda hold=hold, stop=stop: hold.stop == stop)
            assert hold.stopped


def test_what_is_told_while_redis_is_away_is_told_again() -> None:
    hold = Hold(FakeLease(StoreUnreachable("away"), "in_progress", LeaseLost("another's")))
    hold.tell(Counts(3))
    hold.tell(Counts(3, 1))
    assert hold.stop is None
    hold.tell(Counts(3, 2))
    assert hold.stop == "lost"
