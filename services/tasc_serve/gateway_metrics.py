"""What one gateway counts, as Prometheus series. It computes no ratio and opens no port."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from tasc_serve.metrics import E2E_S

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
