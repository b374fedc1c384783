"""The loop of a batch worker: takes batches one by one, and gives back those it cannot end.

Tasks with failing engines are paused. A batch's job reports sums, and metrics grow by the
difference between two reports.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Self

import redis
from prometheus_client import CollectorRegistry

from tasc_jobs.batch.work import EngineFailed, JobBusy, JobProgress, JobReport
from tasc_jobs.errors import ClusterError, in_short
from tasc_jobs.worker.one_batch import BAD, Ended, HeldLease, OneBatch, WorkerSettings, forget
from tasc_serve.http.schemas import LONGEST_S
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_store import StoreError
from tasc_store.batches.batch_store import Batch, BatchStore
from tasc_store.batches.leases import BatchLease, take_batch
from tasc_store.errors import LeaseLost, UnknownBatch

_MAX_PAUSE_S: Final = 60.0  # maximum pause of a task
_MAX_ATTEMPTS: Final = 5
_FORGOTTEN_S: Final = LONGEST_S
_NO_MORE: Final = "worker_failed"


class TaskBackoff:
    """Tasks that this worker pauses because their engines fail on this machine.

    Args:
        max_failures: Number of consecutive failures, of all tasks together, that end the worker.
        first_s: Pause after the first failure of a task, in seconds; it doubles with each further
            failure, up to a minute.
        now: A monotonic clock in seconds.
    """

    def __init__(
        self,
        max_failures: int = 5,
        first_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures, self._first_s, self._now = max_failures, first_s, now
        self._in_a_row = 0
        self._failures: dict[str, int] = {}
        self._until: dict[str, float] = {}

    @property
    def paused(self) -> list[str]:
        """The tasks that are paused now."""
        return [task for task, until in self._until.items() if self._now() < until]

    def failed(self, task: str, why: str) -> float:
        """Pause a task after its engines failed; returns the pause in seconds.

        Raises:
            ClusterError: The worker has failed too often.
        """
        self._in_a_row += 1
        if self._in_a_row >= self._max_failures:
            raise ClusterError(
                f"this worker's engines failed {self._in_a_row} times in a row (--max-faults), the"
                f" last time for task {task}: {why}. Other workers may take the batches; fix the"
                " cause and start the worker again"
            )
        pause_s = min(_MAX_PAUSE_S, self._first_s * 2 ** min(self._failures.get(task, 0), 10))
        self._failures[task] = self._failures.get(task, 0) + 1
        self._until[task] = self._now() + pause_s
        return pause_s

    def busy(self, task: str) -> float:
        """Pause a task because another process on this machine runs its batch.

        This does not count as a failure.
        """
        self._until[task] = self._now() + self._first_s
        return self._first_s

    def worked(self, task: str) -> None:
        """Reset the failures of a task because one of its engines is running."""
        self._in_a_row = 0
        self._failures.pop(task, None)


class Counting:
    """Updates the metrics of one batch for the duration of a block."""

    def __init__(self, metrics: BatchMetrics, task: str) -> None:
        self._metrics, self._task = metrics, task
        self._before: JobReport | None = None

    def __enter__(self) -> Self:
        self._metrics.begun(self._task)
        return self

    def __exit__(self, *error: object) -> None:
        self._metrics.released(self._task)

    def ended(self, ended: Ended) -> None:
        if ended.status != "lost":
            self._metrics.ended(self._task, ended.status).inc()

    def count(self, progress: JobProgress) -> None:
        """Count the work since the last call. The first call notes the work of earlier starts."""
        now = progress.report
        before, self._before = self._before, now
        self._metrics.running(self._task).set(progress.running)
        # If the sum is smaller than before, the job was restarted.
        if before is None or now.rows < before.rows:
            return
        failed = max(0, now.errors - before.errors)
        completed = max(0, now.rows - before.rows - failed)
        tokens = max(0, now.tokens - before.tokens)
        self._metrics.done(self._task, completed, failed, tokens)


def _ignore(*values: object) -> None:
    pass


class BatchWorker:
    """Answers batches, one at a time.

    Args:
        tasks: Tasks whose batches are taken; empty means all tasks.
        poll_s: Seconds between two checks for a batch when none is waiting.
        lease_s: Seconds without a renewal after which another worker may take a batch.
        backoff: The tasks that are paused because their engines fail on this machine.
        say: Called with log lines for the user.
        on_progress: Called repeatedly with the progress of a batch.
        ended: Called with each batch that ends.
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: WorkerSettings,
        tasks: Sequence[str] = (),
        *,
        poll_s: float = 1.0,
        lease_s: float = 10.0,
        backoff: TaskBackoff | None = None,
        metrics: BatchMetrics | None = None,
        say: Callable[[str], None] = _ignore,
        on_progress: Callable[[Batch, JobProgress], None] = _ignore,
        ended: Callable[[Ended], None] = _ignore,
    ) -> None:
        self._client, self._settings, self._tasks = client, settings, tasks
        self._poll_s, self._lease_s = poll_s, lease_s
        self._say, self._on_progress, self._ended = say, on_progress, ended
        self._backoff = backoff or TaskBackoff()
        self._metrics = metrics or BatchMetrics(CollectorRegistry())
        self._unreleased: BatchLease | None = None

    def run_waiting(self) -> None:
        """Answer waiting batches until none is left and no task is paused.

        Raises:
            StoreError: Redis fails.
            ClusterError: No engine works; the batch is given back, and the attempt is not counted.
        """
        self._forget_ended()
        while True:
            if self._unreleased:  # raises StoreError if Redis is still unavailable
                self._unreleased.release()
                self._unreleased = None
            paused = self._backoff.paused
            if lease := take_batch(self._client, self._lease_s, self._tasks, paused):
                self._run(lease)
            elif paused:
                time.sleep(self._poll_s)
            else:
                return

    def run_for_ever(self) -> None:
        """Answer batches and wait for more, even while Redis is unavailable.

        Raises:
            ClusterError: No engine works.
        """
        while True:
            try:
                self.run_waiting()
            except StoreError as error:
                self._say(f"waiting for the store: {error}")
            time.sleep(self._poll_s)

    def _run(self, lease: BatchLease) -> None:
        batch, failed = lease.batch, False
        self._say(f"{batch.id}: {batch.model}, {batch.endpoint}{_again(batch)}")
        try:
            with HeldLease(lease) as hold, Counting(self._metrics, batch.model) as counting:
                report = partial(self._report, batch, counting)
                ended = self._outcome(OneBatch(self._client, hold, self._settings, report))
                counting.ended(ended)
                self._ended(ended)
        except LeaseLost as error:
            self._say(f"{batch.id}: {error}")
        except EngineFailed as error:
            self._leave(batch, error)
        except ClusterError:
            raise
        except JobBusy as error:
            pause_s = self._backoff.busy(batch.model)
            self._say(f"{batch.id}: {in_short(error)}; the batch is tried again in {pause_s:g} s")
        except BAD as error:
            failed = True
            self._say(f"{batch.id}: {in_short(error)}")
            time.sleep(self._poll_s)
        finally:
            self._give_back(lease, failed)
        with suppress(UnknownBatch):
            if BatchStore(self._client).get(batch.id).ended:
                forget(self._settings, batch)

    def _report(self, batch: Batch, counting: Counting, progress: JobProgress) -> None:
        if progress.engines:
            self._backoff.worked(batch.model)
        counting.count(progress)
        self._on_progress(batch, progress)

    def _leave(self, batch: Batch, error: EngineFailed) -> None:
        """Pause the task of a batch after its engines failed.

        Raises:
            ClusterError: Engines failed too often.
        """
        self._metrics.engine_failures(batch.model).inc()
        pause_s = self._backoff.failed(batch.model, in_short(error))
        self._say(
            f"{batch.id}: {in_short(error)}. This does not count against the batch; task "
            f"{batch.model} is left to other workers for {pause_s:g} s"
        )

    def _give_back(self, lease: BatchLease, failed: bool) -> None:
        try:
            lease.release(failed)
        except StoreError:
            # The lease is released later. Otherwise this attempt would count as one that killed
            # its worker.
            self._unreleased = None if failed else lease

    def _outcome(self, one: OneBatch) -> Ended:
        """Run a batch, or end it as failed if it has reached the maximum number of attempts.

        Raises:
            StoreError: Redis fails, or another worker has taken the batch.
            JobBusy, JobError, ServiceError, TextError, ValueError: The batch can be tried again.
        """
        batch = one.batch
        if batch.attempts > _MAX_ATTEMPTS:
            why = f"{_MAX_ATTEMPTS} workers died with this batch before a line was answered"
            return one.failed(_NO_MORE, why)
        try:
            return one.run()
        except (JobBusy, ClusterError):
            raise
        except BAD as error:
            if batch.attempts < _MAX_ATTEMPTS:
                raise
            self._say(f"{batch.id}: {in_short(error)}")
            return one.failed(_NO_MORE, in_short(error))

    def _forget_ended(self) -> None:
        """Remove the folders of ended batches that killed workers left behind."""
        for folder in sorted(self._settings.folder.glob("batch-*")):
            try:
                batch = BatchStore(self._client).get(folder.name)
            except UnknownBatch:
                # Removed only after some time, as a worker of another store may share this folder.
                if time.time() - folder.stat().st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(folder, ignore_errors=True)
            else:
                if batch.ended:
                    forget(self._settings, batch)


def _again(batch: Batch) -> str:
    return f", again (attempt {batch.attempts})" if batch.attempts > 1 else ""
