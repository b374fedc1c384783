"""Metrics of a batch worker."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from tasc_store.batches.batch_store import ENDED

_RESULTS: Final = ("completed", "failed")


class BatchMetrics:
    """The series of one worker.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "tasc_batch_requests",
            "Requests of batches that were done, by whether they were answered or failed.",
            ("task", "result"),
            registry=registry,
        )
        self._ended = Counter(
            "tasc_batch_ended",
            "Batches that this worker ended, by their last status.",
            ("task", "status"),
            registry=registry,
        )
        self._tokens = Counter(
            "tasc_batch_tokens",
            "Tokens of the answers to requests of batches, end-of-sequence included.",
            ("task",),
            registry=registry,
        )
        self._faults = Counter(
            "tasc_batch_engine_failures",
            "Batches that a worker gave back since its engines failed, through no fault of theirs.",
            ("task",),
            registry=registry,
        )
        self._in_progress = Gauge(
            "tasc_batch_in_progress",
            "Batches that this worker answers now: 1 or 0.",
            ("task",),
            registry=registry,
        )
        self._running = Gauge(
            "tasc_batch_rows_running",
            "Requests of a batch that the worker's engines have in hand.",
            ("task",),
            registry=registry,
        )

    def begun(self, task: str) -> None:
        """A batch was taken; what is counted of its task is there from then on."""
        # At 0: Prometheus takes no series' first value for a rise.
        for result in _RESULTS:
            self._requests.labels(task, result)
        for status in sorted(ENDED):
            self._ended.labels(task, status)
        self._tokens.labels(task)
        self._faults.labels(task)
        self._running.labels(task).set(0)
        self._in_progress.labels(task).set(1)

    def done(self, task: str, completed: int, failed: int, tokens: int) -> None:
        """Count requests that were done since the last call, and the tokens of their answers."""
        for result, count in zip(_RESULTS, (completed, failed), strict=True):
            self._requests.labels(task, result).inc(count)
        self._tokens.labels(task).inc(tokens)

    def running(self, task: str, rows: int) -> None:
        self._running.labels(task).set(rows)

    def ended(self, task: str, status: str) -> None:
        self._ended.labels(task, status).inc()

    def engine_failed(self, task: str) -> None:
        self._faults.labels(task).inc()

    def let_go(self, task: str) -> None:
        """The batch has ended, or was given back."""
        self._running.labels(task).set(0)
        self._in_progress.labels(task).set(0)
