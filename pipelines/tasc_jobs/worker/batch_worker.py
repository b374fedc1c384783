"""The batch worker's loop: takes one batch after another, and gives back what it cannot end.

Tasks whose engines fail are left alone for a while. What a batch adds to the worker's metrics is
the difference of the sums that its job reports.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Final, Self

import redis

from tasc_jobs.batch.work import EngineFailed, JobBusy, JobProgress
from tasc_jobs.errors import ClusterError, in_short
from tasc_jobs.worker.one_batch import BAD, Ended, Hold, OneBatch, WorkerSettings, forget
from tasc_serve.http.schemas import LONGEST_S
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_store import StoreError
from tasc_store.batches.batch_store import Batch, BatchStore
from tasc_store.batches.leases import BatchLease, take_batch
from tasc_store.errors import LeaseLost, UnknownBatch

MOST_FAULTS: Final = 5
_FIRST_S: Final = 5.0
_LONGEST_S: Final = 60.0


class Rests:
    """Faults of this worker, by task.

    Args:
        most: So many in a row, of all tasks together, are too many.
        first_s: How long a task rests behind its first fault, in seconds; twice as long behind each
            other one, a minute at most.
        now: Seconds on a clock that never goes back.
    """

    def __init__(
        self,
        most: int = MOST_FAULTS,
        first_s: float = _FIRST_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._first_s, self._now = most, first_s, now
        self._in_a_row = 0
        self._faults: dict[str, int] = {}
        self._until: dict[str, float] = {}

    @property
    def resting(self) -> list[str]:
        """Tasks to be left alone now."""
        return [task for task, until in self._until.items() if self._now() < until]

    def failed(self, task: str, why: str) -> float:
        """Have a task rest; for how long, in seconds.

        Raises:
            ClusterError: The worker has failed too often.
        """
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            raise ClusterError(
                f"this worker's engines failed {self._in_a_row} times in a row (--max-faults), the"
                f" last time for task {task}: {why}. Its batches are left to other workers; see to"
                " that and start the worker again"
            )
        pause_s = min(_LONGEST_S, self._first_s * 2 ** min(self._faults.get(task, 0), 10))
        self._faults[task] = self._faults.get(task, 0) + 1
        self._until[task] = self._now() + pause_s
        return pause_s

    def busy(self, task: str) -> float:
        """Have a task rest whose batch another process here still works on; no fault is counted."""
        self._until[task] = self._now() + self._first_s
        return self._first_s

    def worked(self, task: str) -> None:
        """An engine of the task is up."""
        self._in_a_row = 0
        self._faults.pop(task, None)


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


LEASE_S: Final = 10.0
_MOST_ATTEMPTS: Final = 5
_FORGOTTEN_S: Final = LONGEST_S
_NO_MORE: Final = "worker_failed"


class BatchWorker:
    """Answers batches, one at a time.

    Args:
        tasks: Only batches of these; empty: of any.
        poll_s: How often it looks for a batch when there was none.
        lease_s: A batch whose worker was silent for so long is another's.
        say: Told what people should know, in a line.
        told: Told how far a batch is, now and then.
        ended: Told what came of one.
        rests: Which tasks are left alone since engines fail here.
    """

    def __init__(
        self,
        client: redis.Redis,
        settings: WorkerSettings,
        tasks: Sequence[str],
        poll_s: float,
        lease_s: float = LEASE_S,
        *,
        say: Callable[[str], None],
        told: Callable[[Batch, JobProgress], None],
        ended: Callable[[Ended], None],
        metrics: BatchMetrics,
        rests: Rests,
    ) -> None:
        self._client, self._settings, self._tasks = client, settings, tasks
        self._poll_s, self._lease_s = poll_s, lease_s
        self._say, self._told, self._ended = say, told, ended
        self._metrics, self._rests = metrics, rests
        self._owed: BatchLease | None = None

    def run_waiting(self) -> None:
        """Answer the batches that wait, until there is none and no task rests.

        Raises:
            StoreError: Redis fails.
            ClusterError: No engine can work; the batch is given back, with no attempt counted.
        """
        self._forget_ended()
        while True:
            self._pay()
            resting = self._rests.resting
            if lease := take_batch(self._client, self._lease_s, self._tasks, resting):
                self._run(lease)
            elif resting:
                time.sleep(self._poll_s)
            else:
                return

    def run_for_ever(self) -> None:
        """The same, and wait for more; while Redis is away too.

        Raises:
            ClusterError: No engine can work.
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
            with Hold(lease) as hold, Counting(self._metrics, batch.model) as counting:
                told = partial(self._heard, batch, counting)
                ended = self._outcome(OneBatch(self._client, hold, self._settings, told))
                counting.ended(ended)
                self._ended(ended)
        except LeaseLost as error:
            self._say(f"{batch.id}: {error}")
        except EngineFailed as error:
            self._leave(batch, error)
        except ClusterError:
            raise
        except JobBusy as error:
            pause_s = self._rests.busy(batch.model)
            self._say(f"{batch.id}: {in_short(error)}; looked at again in {pause_s:g} s")
        except BAD as error:
            failed = True
            self._say(f"{batch.id}: {in_short(error)}")
            time.sleep(self._poll_s)
        finally:
            self._give_back(lease, failed)
        with suppress(UnknownBatch):
            if BatchStore(self._client).get(batch.id).ended:
                forget(self._settings, batch)

    def _heard(self, batch: Batch, counting: Counting, progress: JobProgress) -> None:
        if progress.engines:
            self._rests.worked(batch.model)
        counting.told(progress)
        self._told(batch, progress)

    def _leave(self, batch: Batch, error: EngineFailed) -> None:
        """Raises ClusterError: it happened too often."""
        self._metrics.engine_failed(batch.model)
        pause_s = self._rests.failed(batch.model, in_short(error))
        self._say(
            f"{batch.id}: {in_short(error)}. It does not count against the batch; task "
            f"{batch.model} is left to other workers for {pause_s:g} s"
        )

    def _give_back(self, lease: BatchLease, failed: bool) -> None:
        try:
            lease.release(failed)
        except StoreError:
            # Else an attempt that Redis was away in would count as one that killed a worker.
            self._owed = None if failed else lease

    def _pay(self) -> None:
        """Raises StoreError: Redis is still away."""
        if self._owed:
            self._owed.release()
            self._owed = None

    def _outcome(self, one: OneBatch) -> Ended:
        """Ends a batch that was tried often enough.

        Raises:
            StoreError: Redis fails, or the batch is another worker's by now.
            JobBusy, JobError, ServiceError, TextError, ValueError: It can be tried again.
        """
        batch = one.batch
        if batch.attempts > _MOST_ATTEMPTS:
            why = f"{_MOST_ATTEMPTS} workers died with it before a line was answered"
            return one.failed(_NO_MORE, why)
        try:
            return one.run()
        except (JobBusy, ClusterError):
            raise
        except BAD as error:
            if batch.attempts < _MOST_ATTEMPTS:
                raise
            self._say(f"{batch.id}: {in_short(error)}")
            return one.failed(_NO_MORE, in_short(error))

    def _forget_ended(self) -> None:
        """What workers that were killed have left of batches that have ended since."""
        for folder in sorted(self._settings.folder.glob("batch-*")):
            try:
                batch = BatchStore(self._client).get(folder.name)
            except UnknownBatch:
                # Not at once: it may be of another store, whose worker shares our folder.
                if time.time() - folder.stat().st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(folder, ignore_errors=True)
            else:
                if batch.ended:
                    forget(self._settings, batch)


def _again(batch: Batch) -> str:
    return f", again (attempt {batch.attempts})" if batch.attempts > 1 else ""
