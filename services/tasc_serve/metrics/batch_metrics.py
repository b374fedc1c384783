"""Metrics of a batch worker."""

from typing import Final

from prometheus_client import CollectorRegistry

from tasc_serve.metrics.replica_metrics import Series
from tasc_store.batches.batch_store import ENDED

_RESULTS: Final = ("completed", "failed")


class BatchMetrics:
    """The metrics of one worker.

    Call each metric with the name of a batch's task and, if it has a further label, the label's
    value.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Series(registry, {}, "task")
        counters, gauges = make.counters, make.gauges
        self._requests = counters(
            "batch_requests", "Finished requests of batches, by result.", "result"
        )
        self.ended = counters(
            "batch_ended", "Batches that this worker ended, by their last status.", "status"
        )
        self._tokens = counters(
            "batch_tokens",
            "Tokens of the answers to requests of batches, end-of-sequence included.",
        )
        self.engine_failures = counters(
            "batch_engine_failures", "Batches that a worker returned because its engines failed."
        )
        self._in_progress = gauges(
            "batch_in_progress", "Batches that this worker answers now: 1 or 0."
        )
        self.running = gauges(
            "batch_rows_running", "Requests of a batch that are in the worker's engines."
        )

    def begun(self, task: str) -> None:
        """Marks a batch as started. From then on, the counters of its task are exported, from 0."""
        # Prometheus does not count a series' first value as an increase.
        for result in _RESULTS:
            self._requests(task, result)
        for status in sorted(ENDED):
            self.ended(task, status)
        self._tokens(task)
        self.engine_failures(task)
        self.running(task).set(0)
        self._in_progress(task).set(1)

    def done(self, task: str, completed: int, failed: int, tokens: int) -> None:
        """Counts requests done since the last call, and the tokens of their answers."""
        for result, count in zip(_RESULTS, (completed, failed), strict=True):
            self._requests(task, result).inc(count)
        self._tokens(task).inc(tokens)

    def released(self, task: str) -> None:
        """Resets the gauges after a batch has ended or has gone back to the queue."""
        self.running(task).set(0)
        self._in_progress(task).set(0)
