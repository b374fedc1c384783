"""A gateway says what waits for a worker, of its own tasks always, be Redis away now and then."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from tasc_serve.queue_metrics import QueueMetrics
from tasc_serve.queue_watch import QueueWatch
from tasc_store import StoreUnreachable
from tasc_store.batch_queue import Waiting


class Queue:
    """Says what the script has, the last of it for ever; what is shown whenever it is asked."""

    def __init__(
        self, registry: CollectorRegistry, *said: Mapping[str, Waiting] | Exception
    ) -> None:
        self.registry, self.said = registry, list(said)
        self.shown: list[tuple[float | None, float | None]] = []

    def waiting(self) -> Mapping[str, Waiting]:
        self.shown.append(shown(self.registry, "tag"))
        said: Any = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return dict(said)


def shown(registry: CollectorRegistry, task: str) -> tuple[float | None, float | None]:
    names = ("tasc_batch_waiting", "tasc_batch_oldest_waiting_seconds")
    found = [registry.get_sample_value(name, {"task": task}) for name in names]
    return found[0], found[1]


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_tasks_of_ones_own_are_there_at_0_and_others_from_when_a_batch_waits() -> None:
    registry = CollectorRegistry()
    metrics = QueueMetrics(registry, ["tag"])
    assert (shown(registry, "tag"), shown(registry, "other")) == ((0, 0), (None, None))
    metrics.seen({"other": Waiting(2, 30.0)})
    assert (shown(registry, "tag"), shown(registry, "other")) == ((0, 0), (2, 30))
    metrics.seen({"tag": Waiting(1, 5.0)})
    assert (shown(registry, "tag"), shown(registry, "other")) == ((1, 5), (0, 0))


def test_a_store_that_is_away_changes_nothing_and_is_asked_again() -> None:
    registry = CollectorRegistry()
    metrics = QueueMetrics(registry, ["tag"])
    away = StoreUnreachable("away")
    three, four = {"tag": Waiting(3, 7.0)}, {"tag": Waiting(4, 9.0)}
    queue = Queue(registry, three, away, ValueError("odd"), four)
    watch = QueueWatch(queue, metrics, 0.01)
    try:
        wait_for(lambda: shown(registry, "tag") == (4, 9))
        assert queue.shown[:4] == [(0, 0), (3, 7), (3, 7), (3, 7)]
    finally:
        watch.close()
