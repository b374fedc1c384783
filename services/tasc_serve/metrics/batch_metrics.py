"""Metrics of a batch worker."""

from typing import Final

from prometheus_client import CollectorRegistry

from tasc_serve.metrics.replica_metrics import Series
from tasc_store.batches.batch_store import ENDED

_RESULTS: Final = ("completed", "failed")


class BatchMetrics:
    """The series of one worker.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Series(registry, {})
        self._requests = make.counters(
            "tasc_batch_requests",
            "Finished requests of batches, by result.",
            *("task", "result"),
        )
        self._ended = make.counters(
            "tasc_batch_ended",
            "Batches that this worker ended, by their last status.",
            *("task", "status"),
        )
        self._tokens = make.counters(
            "tasc_batch_tokens",
            "Tokens of the answers to requests of batches, end-of-sequence included.",
            "task",
        )
        self._failures = make.counters(
            "tasc_batch_engine_failures",
            "Batches that a worker returned because its engines failed.",
            "task",
        )
        self._in_progress = make.gauges(
            "tasc_batch_in_progress", "Batches that this worker answers now: 1 or 0.", "task"
        )
        self._running = make.gauges(
            "tasc_batch_rows_running",
            "Requests of a batch that are in the worker's engines.",
            "task",
        )

    def begun(self, task: str) -> None:
        """A batch was taken. The counters of its task are exported from then on, at 0."""
        # Prometheus takes no series' first value for a rise.
        for result in _RESULTS:
            self._requests(task, result)
        for status in sorted(ENDED):
            self._ended(task, status)
        self._tokens(task)
        self._failures(task)
        self._running(task).set(0)
        self._in_progress(task).set(1)

    def done(self, task: str, completed: int, failed: int, tokens: int) -> None:
        """Count requests that were done since the last call, and the tokens of their answers."""
        for result, count in zip(_RESULTS, (completed, failed), strict=True):
            self._requests(task, result).inc(count)
        self._tokens(task).inc(tokens)

    def running(self, task: str, rows: int) -> None:
        self._running(task).set(rows)

    def ended(self, task: str, status: str) -> None:
        self._ended(task, status).inc()

    def engine_failed(self, task: str) -> None:
        self._failures(task).inc()

    def let_go(self, task: str) -> None:
        """The batch has ended, or was given back."""
        self._running(task).set(0)
        self._in_progress(task).set(0)
