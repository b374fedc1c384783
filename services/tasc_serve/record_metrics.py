"""Which version of its task a replica serves, as a Prometheus series. It watches no store."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge


class RecordMetrics:
    """The series of one replica.

    Args:
        version: Asked at each scrape.

    Raises:
        ValueError: The registry already holds this series.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        version: Callable[[], int],
        *,
        task: str,
        model_name: str,
    ) -> None:
        served = Gauge(
            "tasc_record_version",
            "Version of the task's record that new requests are answered by.",
            ("task", "model_name"),
            registry=registry,
        )
        served.labels(task, model_name).set_function(version)
