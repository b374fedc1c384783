"""One batch from its file to its files, by a job that goes on where an earlier start was ended.

Its state is a folder of this machine, named as the batch: a worker that finds none begins anew. It
takes no batch and gives none back.
"""

import dataclasses
import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import redis

from tasc_jobs.batch import JobProgress, JobSpec, Record, discard, run_job
from tasc_jobs.batch.errors import JobBusy, JobChanged
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.worker.answers import LineAnswers
from tasc_jobs.worker.lease import Hold
from tasc_jobs.worker.lines import BatchLines
from tasc_jobs.worker.outputs import Outputs
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_runtime.rows import whole_file
from tasc_serve.settings import LimitSettings
from tasc_store import CorruptArtifact, TaskStore, UnknownTask, UnknownVersion
from tasc_store.batches.batch_store import Batch, BatchFault, Status
from tasc_store.batches.files import FileStore
from tasc_store.batches.leases import Counts
from tasc_store.errors import LeaseLost, UnknownFile
from tasc_text import TextError

_INPUT: Final = "input.jsonl"
_JOB: Final = "job"
# What may be the batch's own fault. A cluster or a disk that fails is not: it ends the worker.
BAD: Final = (JobError, ServiceError, TextError, ValueError)

Tell = Callable[[JobProgress], None]


@dataclass(frozen=True)
class WorkerSettings:
    """How batches are answered here.

    Attributes:
        folder: Where batches' states are, each in a folder of its own.
        limits: The service's own, which lines are held to.
        actors: Most engines of a batch.
        gpus: GPUs of each engine.
    """

    url: str
    folder: Path
    engine: EngineSettings = field(default_factory=EngineSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    actors: int = 1
    gpus: float = 0.0

    def folder_of(self, batch: Batch) -> Path:
        return self.folder / batch.id

    def spec(self, batch: Batch) -> JobSpec:
        pins = {"batch": batch.id, "endpoint": batch.endpoint, "input": batch.input_file_id}
        return JobSpec(
            self.url,
            batch.model,
            self.folder_of(batch) / _JOB,
            {**pins, "max_model_len": self.engine.max_model_len},
            engine=self.engine,
            actors=self.actors,
            actor_gpus=self.gpus,
        )


@dataclass(frozen=True)
class Ended:
    """What came of a batch, or of this worker's part in it.

    Attributes:
        status: ``lost`` where another worker has it by now.
    """

    batch: Batch
    status: str
    counts: Counts
    seconds: float
    errors: tuple[BatchFault, ...] = ()


class OneBatch:
    """A batch that this worker holds.

    Args:
        told: How far it is, now and then.
    """

    def __init__(
        self,
        client: redis.Redis,
        hold: Hold,
        settings: WorkerSettings,
        told: Tell = lambda progress: None,
    ) -> None:
        self._client, self._hold, self._settings, self._told = client, hold, settings, told
        self.batch = hold.lease.batch
        self._files = FileStore(client)
        self._counts = Counts(self.batch.total, self.batch.completed, self.batch.failed)
        self._status: Status = "completed"
        self._faults: tuple[BatchFault, ...] = ()
        self._given_up: BatchFault | None = None
        self._lost = False
        self._began = time.monotonic()

    def run(self) -> Ended:
        """Answer what is missing, and end the batch.

        Raises:
            JobBusy: Another process of this machine works on it.
            JobError: It cannot go on; its state is kept.
            StoreError: Redis fails; the same.
        """
        self._fail_or_answer()
        return self._ended()

    def failed(self, code: str, message: str) -> Ended:
        """End the batch with the answers that it has, if they can be read.

        Raises:
            JobBusy, ClusterError, StoreError: As `run`.
        """
        self._given_up = BatchFault(code, message)
        try:
            self._fail_or_answer()
        except (JobBusy, ClusterError):
            raise
        except (*BAD, UnknownVersion):
            self._fail(self._given_up)
        return self._ended()

    def _ended(self) -> Ended:
        status = "lost" if self._lost else self._status
        seconds = time.monotonic() - self._began
        return Ended(self.batch, status, self._counts, seconds, self._faults)

    def _fail_or_answer(self) -> None:
        batch, limits = self.batch, self._settings.limits
        try:
            TaskStore(self._client).get(batch.model)
            lines = BatchLines(self._fetched(), batch, limits)
        except UnknownTask as error:
            return self._fail(BatchFault("model_not_found", str(error)))
        except (UnknownFile, CorruptArtifact) as error:
            return self._fail(BatchFault("input_file_lost", str(error)))
        checked = lines.check()
        if checked.faults:
            return self._fail(*checked.faults)
        self._counts = dataclasses.replace(self._counts, total=checked.total)
        self._hold.tell(self._counts, "in_progress")
        try:
            self._answer(lines)
        except LeaseLost:
            self._lost = True

    def _fail(self, *faults: BatchFault) -> None:
        self._status, self._faults = "failed", faults
        self._hold.lease.finish("failed", self._counts, {}, faults)

    def _fetched(self) -> Path:
        """The batch's file on this machine, whole."""
        path = self._settings.folder_of(self.batch) / _INPUT
        try:
            stored = self._files.get(self.batch.input_file_id)
        except UnknownFile:
            if path.exists():  # fetched before it expired
                return path
            raise
        if not path.exists() or _sha256(path) != stored.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A worker that was thought dead may be fetching it too.
            with whole_file(path, tag=f".{uuid.uuid4().hex}") as file:
                file.writelines(self._files.blocks(stored))
        return path

    def _answer(self, lines: BatchLines) -> None:
        batch, limits = self.batch, self._settings.limits
        spec = dataclasses.replace(self._settings.spec(batch), total=self._counts.total)
        answers = LineAnswers(batch.id, batch.endpoint, batch.model, batch.created_at, limits)

        def finish(records: Iterable[Record], whole: bool) -> None:
            self._end(lines, records, whole)

        def run(spec: JobSpec) -> None:
            stop, progress = self._should_stop, self._progress
            run_job(spec, lines.rows, answers, finish, should_stop=stop, progress=progress)

        try:
            run(spec)
        except (JobChanged, UnknownVersion):
            if self._given_up:
                raise
            # Nothing of it was handed out yet; what it was pinned to is gone or no longer meant.
            run(dataclasses.replace(spec, restart=True))

    def _should_stop(self) -> bool:
        return self._given_up is not None or self._hold.stopped

    def _progress(self, progress: JobProgress) -> None:
        answered = progress.done - progress.errors
        self._counts = Counts(self._counts.total, answered, progress.errors)
        self._hold.tell(self._counts)
        self._told(progress)

    def _end(self, lines: BatchLines, records: Iterable[Record], whole: bool) -> None:
        stop = self._hold.stop
        if stop == "lost":  # raised, so that the job does not count as ended here
            raise LeaseLost(f"batch {self.batch.id} is another worker's by now")
        self._hold.tell(self._counts, "finalizing")
        if not whole and stop is None:
            assert self._given_up is not None
            self._status, self._faults = "failed", (self._given_up,)
        elif not whole and stop is not None:
            self._status = stop
        outputs = Outputs(self._files, self.batch)
        try:
            outputs.write(lines.rows(), records, self._status)
            files = outputs.end()
        except BaseException:
            outputs.abandon()
            raise
        self._counts = outputs.counts
        # If it raises, Redis may have done it nevertheless: nothing is removed.
        self._hold.lease.finish(self._status, self._counts, files, self._faults)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget(settings: WorkerSettings, batch: Batch) -> None:
    """Remove what is left here of a batch that has ended.

    Raises:
        StoreError: Redis fails.
    """
    try:
        if (settings.folder_of(batch) / _JOB).exists():
            discard(settings.spec(batch))
    except JobBusy:
        return  # who works on it will find that it has ended
    shutil.rmtree(settings.folder_of(batch), ignore_errors=True)
