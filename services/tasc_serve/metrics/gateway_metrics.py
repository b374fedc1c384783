"""Metrics of a gateway: requests, calls that outlived a replica, limits met, batches that wait.

Every gateway publishes the same count of waiting batches of one store: take the maximum, not the
sum.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tasc_serve.metrics.replica_metrics import E2E_S
from tasc_store.batches.leases import Waiting

_CAUSES: Final = ("died", "silent", "broken")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)


class FailoverMetrics:
    """The series of one gateway.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lost = Counter(
            "tasc_failovers",
            "Calls that were brought to another replica, by what became of the first: died, silent"
            " or broken.",
            ("task", "why"),
            registry=registry,
        )
        self._gave_up = Counter(
            "tasc_failovers_refused",
            "Calls that ended with a replica: lost too often, or over the budget of the gateway.",
            ("task",),
            registry=registry,
        )
        self._seconds = Histogram(
            "tasc_failover_seconds",
            "From the loss of a replica to the next piece of an answer, as clients saw it.",
            ("task",),
            registry=registry,
            buckets=_SECONDS,
        )

        self._seen = Gauge(
            "tasc_replicas_seen",
            "Replicas that answered this gateway lately.",
            ("task",),
            registry=registry,
        )

    def seen(self, task: str, replicas: int) -> None:
        """Say how many replicas of a task answer; what is counted of it is there from then on."""
        self._seen.labels(task).set(replicas)
        # At 0: Prometheus takes no series' first value for a rise.
        self._gave_up.labels(task)
        for why in _CAUSES:
            self._lost.labels(task, why)

    def lost(self, task: str, why: str) -> None:
        self._lost.labels(task, why).inc()

    def gave_up(self, task: str) -> None:
        self._gave_up.labels(task).inc()

    def recovered(self, task: str, seconds: float) -> None:
        self._seconds.labels(task).observe(seconds)


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


class RateMetrics:
    """The series of one gateway.

    Raises:
        ValueError: The registry already holds it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._limited = Counter(
            "tasc_rate_limited",
            "Requests answered 429, by whose limit they met: the key's or the task's.",
            ("task", "what"),
            registry=registry,
        )

    def observe(self, task: str, what: str) -> None:
        """Count one refusal.

        Args:
            task: The name of a served task.
            what: ``key`` or ``task``.
        """
        self._limited.labels(task, what).inc()


NO_TASK: Final = "-"  # no task can have this name


class GatewayMetrics:
    """The series of one gateway.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "tasc_http_requests", "HTTP requests answered.", ("task", "code"), registry=registry
        )
        self._seconds = Histogram(
            "tasc_http_request_seconds",
            "First byte of the request to last byte of the answer.",
            ("task",),
            registry=registry,
            buckets=E2E_S,
        )

    def observe_http(self, task: str | None, code: int, seconds: float) -> None:
        """Count one answered HTTP request.

        Args:
            task: The name of a served task. None where the request named no such task: names that
                clients make up must not become labels, each of which lives as long as the process.
            code: The HTTP status.
            seconds: Until the last byte was sent.
        """
        self._requests.labels(task or NO_TASK, str(code)).inc()
        self._seconds.labels(task or NO_TASK).observe(seconds)
