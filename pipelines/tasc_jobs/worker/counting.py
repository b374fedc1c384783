"""What a worker's batch adds to its metrics: of sums that are told, what is new. It ends none."""

from types import TracebackType
from typing import Self

from tasc_jobs.batch import JobProgress
from tasc_jobs.worker.one_batch import Ended
from tasc_serve.batch_metrics import BatchMetrics


class Counting:
    """One batch in a worker's hands, for the time of a block."""

    def __init__(self, metrics: BatchMetrics, task: str) -> None:
        self._metrics, self._task = metrics, task
        self._before: JobProgress | None = None

    def __enter__(self) -> Self:
        self._metrics.begun(self._task)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.let_go(self._task)

    def ended(self, ended: Ended) -> None:
        if ended.status != "lost":
            self._metrics.ended(self._task, ended.status)

    def told(self, now: JobProgress) -> None:
        """How far the batch is; what is told first was done by earlier starts."""
        before, self._before = self._before, now
        self._metrics.running(self._task, now.running)
        # Fewer than before: the job began anew, or Redis came back without its last writes.
        if before is None or now.done < before.done:
            return
        failed = max(0, now.errors - before.errors)
        completed = max(0, now.done - before.done - failed)
        tokens = max(0, now.tokens - before.tokens)
        self._metrics.done(self._task, completed, failed, tokens)
