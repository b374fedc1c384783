"""Batches that wait for a worker, as Prometheus series of a gateway, which is there without one.

Every gateway says the same of one store: the greatest counts, not the sum. It asks no store.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from tasc_store.batch_queue import Waiting

_NONE = Waiting(0, 0.0)


class QueueMetrics:
    """The series of one gateway.

    Args:
        tasks: That are there from the start, at 0; another service's come when a batch waits.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, tasks: Sequence[str]) -> None:
        self._tasks = set(tasks)
        self._waiting = Gauge(
            "tasc_batch_waiting", "Batches that no worker holds.", ("task",), registry=registry
        )
        self._oldest = Gauge(
            "tasc_batch_oldest_waiting_seconds",
            "How long ago the first of them was asked for, or last held by a worker.",
            ("task",),
            registry=registry,
        )
        self.seen({})

    def seen(self, found: Mapping[str, Waiting]) -> None:
        """What waits now, by task; nothing of those that are not named."""
        self._tasks |= found.keys()
        for task in self._tasks:
            waiting = found.get(task, _NONE)
            self._waiting.labels(task).set(waiting.batches)
            self._oldest.labels(task).set(waiting.oldest_s)
