"""How often a limit was met, as a Prometheus series. It knows no limit and no key."""

from prometheus_client import CollectorRegistry, Counter


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
