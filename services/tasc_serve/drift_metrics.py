"""What is known of the draft index in use, and roll-backs from it, as Prometheus series."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class DriftMetrics:
    """The series of one replica.

    What is expected carries the labels of the counters it is compared with; where nothing is
    known of an index there is no sample.

    Args:
        labels: Those of the replica's other series.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._forecast = Gauge(
            "tasc_forecast_tokens_per_step",
            "Tokens per step that the draft index in use brought on rows it had not seen.",
            tuple(labels),
            registry=registry,
        )
        self._built = Gauge(
            "tasc_draft_index_built_timestamp_seconds",
            "When the draft index in use was built, in seconds since the epoch.",
            tuple(labels),
            registry=registry,
        )
        self._rollbacks = Counter(
            "tasc_index_rollbacks",
            "Draft indexes that this replica took out of use since they drafted worse.",
            tuple(labels),
            registry=registry,
        )
        self._rollbacks.labels(**self._labels)

    def expect(self, tokens_per_step: float | None) -> None:
        """Say what the index in use is expected to bring; None: nobody knows."""
        if tokens_per_step is None:
            self._forecast.clear()
        else:
            self._forecast.labels(**self._labels).set(tokens_per_step)

    def built(self, at: float | None) -> None:
        """Say when the index in use was built, in seconds since the epoch; None: there is none."""
        if at is None:
            self._built.clear()
        else:
            self._built.labels(**self._labels).set(at)

    def drafted_by(self, proposer: str) -> None:
        """Another mixture makes the drafts; what is expected of them is to be said anew."""
        self._forecast.clear()
        self._built.clear()
        self._labels = {**self._labels, "proposer": proposer}
        self._rollbacks.labels(**self._labels)

    def rolled_back(self) -> None:
        """Count a roll-back."""
        self._rollbacks.labels(**self._labels).inc()
