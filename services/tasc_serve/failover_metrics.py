"""What a gateway counts of calls that outlived a replica. It moves no call."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
