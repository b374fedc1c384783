"""What a watcher of indexes says and does where going back to an older one fails."""

import threading
import time
from types import SimpleNamespace

import pytest

from tasc_serve.watcher import IndexWatcher
from tasc_store import StoreUnreachable


def test_a_roll_back_that_fails_is_said_once_as_what_it_is_and_newer_indexes_are_still_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds, looks = [], threading.Semaphore(0)

    def fails() -> None:
        rounds.append(1)
        raise StoreUnreachable("no Redis answers")

    def wait(seen: int | None, timeout_s: float) -> None:
        looks.release()
        time.sleep(timeout_s)

    indexes = SimpleNamespace(store=SimpleNamespace(wait=wait))
    worker = SimpleNamespace(artifact=None, indexes=indexes)
    watcher = IndexWatcher(worker, None, 0.005, lambda artifact: None, fails)
    for _ in range(3):
        assert looks.acquire(timeout=10)
    watcher.close()
    assert len(rounds) >= 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert "was not rolled back, the new one stays in use: no Redis answers" in said
