"""Answers one batch: from its input file to its output and error files.

The work is a job with a folder on this machine. If a killed worker left such a folder, the job
resumes; otherwise it starts from the beginning. Meanwhile a thread renews the batch's lease and
detects when the job must stop.
"""

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

import redis

from tasc_draft.files import whole_file
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.job import run_job
from tasc_jobs.batch.work import (
    JobBusy,
    JobChanged,
    JobProgress,
    JobSpec,
    JobUnreadable,
    Record,
    Row,
)
from tasc_jobs.errors import ClusterError, JobError
from tasc_jobs.worker.lines import BatchLines, LineAnswers, line_id, response_of
from tasc_runtime.data.rows import file_sha256, json_line
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.errors import ServiceError
from tasc_serve.settings import LimitSettings
from tasc_store import CorruptArtifact, StoreError, TaskStore, UnknownTask, UnknownVersion
from tasc_store.batches.batch_store import Batch, BatchFault, Status
from tasc_store.batches.files import FileStore, StoredFile, Upload
from tasc_store.batches.leases import BatchLease, Counts
from tasc_store.errors import LeaseLost, UnknownFile
from tasc_text import TextError

PURPOSE: Final = "batch_output"
_ENDED: Final = {
    "failed": ("batch_failed", "the batch failed before this request was answered; see its errors"),
    "expired": ("batch_expired", "this request was not answered before the batch's deadline"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}
Stop = Literal["cancelled", "expired", "lost"]
_RENEW_S: Final = 1.0  # maximum time until a cancelled batch is noticed
_RENEWALS: Final = 4  # number of renewals in the time of a lease
_INPUT: Final = "input.jsonl"
_JOB: Final = "job"
# Errors that the batch itself may cause. A cluster or a disk that fails ends the worker instead.
BAD: Final = (JobError, ServiceError, TextError, ValueError)

OnProgress = Callable[[JobProgress], None]


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of this worker.

    Attributes:
        folder: Folder with a subfolder for each batch in progress.
        files_url: Place of uploaded files, as in the settings of the service.
        limits: The service's limits, which apply to each line.
        actors: Maximum number of engines per batch.
        gpus: GPUs of each engine.
        engines: Settings of the engines of tasks that have their own, by task.
    """

    url: str
    folder: Path
    files_url: str
    engine: EngineSettings = field(default_factory=EngineSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    actors: int = 1
    gpus: float = 0.0
    engines: Mapping[str, EngineSettings] = field(default_factory=dict)

    def folder_of(self, batch: Batch) -> Path:
        return self.folder / batch.id

    def spec(self, batch: Batch) -> JobSpec:
        pins = {"batch": batch.id, "endpoint": batch.endpoint, "input": batch.input_file_id}
        engine = self.engines.get(batch.model, self.engine)
        return JobSpec(
            self.url,
            batch.model,
            self.folder_of(batch) / _JOB,
            {**pins, "max_model_len": engine.max_model_len},
            engine=engine,
            actors=self.actors,
            actor_gpus=self.gpus,
        )


@dataclass(frozen=True)
class Ended:
    """The end of a batch, or of this worker's work on it.

    Attributes:
        status: The batch's last status; ``lost`` if another worker has the batch now.
    """

    batch: Batch
    status: str
    counts: Counts
    seconds: float
    errors: tuple[BatchFault, ...] = ()


class HeldLease:
    """A batch's lease, renewed by a thread for the duration of a block.

    While Redis is unavailable, the lease is not renewed. When Redis is available again, the lease
    is renewed unless another worker has the batch.

    Attributes:
        stop: Reason why the job must stop; None while it must continue.
    """

    def __init__(self, lease: BatchLease) -> None:
        self.stop: Stop | None = None
        self.lease = lease
        self._renew_s = min(_RENEW_S, lease.seconds / _RENEWALS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="batch-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def report(self, counts: Counts, status: Status | None = None) -> None:
        """Store the batch's progress. Does nothing if Redis is unavailable.

        A missed update is harmless, because the counts are stored again later.
        """
        self._note(lambda: self.lease.report(counts, status))

    def _renew(self) -> None:
        while self.stop != "lost" and not self._over.wait(self._renew_s):
            self._note(self.lease.renew)

    def _note(self, call: Callable[[], str]) -> None:
        """Notes whether the job must stop, by the status that a call of the lease returns."""
        try:
            status = call()
        except LeaseLost:
            self.stop = "lost"
        except StoreError:
            return
        else:
            if self.stop is None and status == "cancelling":
                self.stop = "cancelled"
            if self.stop is None and time.time() >= self.lease.batch.expires_at:
                self.stop = "expired"


class Outputs:
    """The output file and the error file of a batch, while they are uploaded to the store.

    Each line of the input is in one of the two files, which become permanent when the batch ends.
    Every method raises `StoreError` if Redis fails.
    """

    def __init__(self, files: FileStore, batch: Batch) -> None:
        self._files, self._batch = files, batch
        self._uploads: dict[str, Upload] = {}
        self._lines = {"output": 0, "error": 0}
        self._unanswered = 0

    def write(self, rows: Iterable[Row], records: Iterable[Record], ended: str) -> None:
        """Write a line for each row, in order.

        Args:
            records: Records in the order of the rows; unanswered rows have none.
            ended: The batch's last status, which is the reason for unanswered rows.
        """
        found = iter(records)
        record = next(found, None)
        for row in rows:
            if record and record.ordinal == row.ordinal:
                self._add(record)
                record = next(found, None)
            else:
                self._add_unanswered(row, ended)
        assert record is None, f"record {record.ordinal} has no row"

    @property
    def counts(self) -> Counts:
        answered, failed = self._lines["output"], self._lines["error"]
        return Counts(answered + failed, answered, failed - self._unanswered)

    def end(self) -> Mapping[str, StoredFile]:
        """Returns the files that have lines, by the name of the batch's field for each."""
        return {
            f"{kind}_file_id": upload.end(
                f"{self._batch.id}_{kind}.jsonl",
                PURPOSE,
                self._batch.output_ttl_s,
                self._batch.owner,
            )
            for kind, upload in self._uploads.items()
        }

    def abandon(self) -> None:
        for upload in self._uploads.values():
            upload.abandon()

    def _add(self, record: Record) -> None:
        if record.error is None:
            self._put("output", record, {"status_code": 200, "body": record.content}, None)
        else:
            self._put("error", record, response_of(record.error), None)

    def _add_unanswered(self, row: Row, ended: str) -> None:
        code, message = _ENDED[ended]
        self._unanswered += 1
        self._put("error", row, None, {"code": code, "message": message})

    def _put(
        self,
        kind: str,
        line: Row | Record,
        response: dict[str, Any] | None,
        error: dict[str, str] | None,
    ) -> None:
        name = f"batch_req_{line_id(self._batch.id, line.ordinal)}"
        answer = response and {"request_id": name, **response}
        content = {"id": name, "custom_id": line.id, "response": answer, "error": error}
        self._lines[kind] += 1
        if kind not in self._uploads:
            self._uploads[kind] = self._files.begin()
        self._uploads[kind].write(json_line(content))


class OneBatch:
    """A batch that this worker holds.

    Args:
        on_progress: Called repeatedly with the job's progress.
    """

    def __init__(
        self,
        client: redis.Redis,
        lease: HeldLease,
        settings: WorkerSettings,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        self._client, self._lease = client, lease
        self._settings, self._on_progress = settings, on_progress
        self.batch = lease.lease.batch
        self._files = FileStore(client, settings.files_url)
        self._counts = Counts(self.batch.total, self.batch.completed, self.batch.failed)
        self._status: Status = "completed"
        self._faults: tuple[BatchFault, ...] = ()
        self._given_up: BatchFault | None = None
        self._lost = False
        self._began = time.monotonic()

    def run(self) -> Ended:
        """Answer the lines that have no answer yet, and end the batch.

        Raises:
            JobBusy: Another process is running the job.
            JobError: The job cannot continue. Its folder is kept.
            StoreError: Redis fails. The folder is kept.
        """
        self._fail_or_answer()
        return self._ended()

    def failed(self, code: str, message: str) -> Ended:
        """End the batch as failed, with its answers so far if they can be read.

        Raises:
            JobBusy, ClusterError, StoreError: See `run`.
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
        self._lease.report(self._counts, "in_progress")
        try:
            self._answer(lines)
        except LeaseLost:
            self._lost = True

    def _fail(self, *faults: BatchFault) -> None:
        self._status, self._faults = "failed", faults
        self._lease.lease.finish("failed", self._counts, {}, faults)

    def _fetched(self) -> Path:
        """Returns the batch's input file on this machine, and downloads it if necessary."""
        path = self._settings.folder_of(self.batch) / _INPUT
        try:
            stored = self._files.get(self.batch.input_file_id)
        except UnknownFile:
            if path.exists():  # fetched before it expired
                return path
            raise
        if not path.exists() or file_sha256(path) != stored.sha256:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A worker that was considered dead may be downloading the file, too.
            with whole_file(path) as file:
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
        except (JobChanged, JobUnreadable, UnknownVersion):
            if self._given_up:
                raise
            # The version of the task was deleted, the settings changed, the job's folder is damaged
            # or another release started the job. No answer was published yet.
            run(dataclasses.replace(spec, restart=True))

    def _should_stop(self) -> bool:
        return self._given_up is not None or self._lease.stopped

    def _progress(self, progress: JobProgress) -> None:
        done, errors = progress.report.rows, progress.report.errors
        self._counts = Counts(self._counts.total, done - errors, errors)
        self._lease.report(self._counts)
        self._on_progress(progress)

    def _end(self, lines: BatchLines, records: Iterable[Record], whole: bool) -> None:
        stop = self._lease.stop
        if stop == "lost":  # raised, so that the job does not count as finished
            raise LeaseLost(f"another worker has taken batch {self.batch.id}")
        self._lease.report(self._counts, "finalizing")
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
        # If this call raises an error, Redis may still have applied it, so nothing is removed.
        self._lease.lease.finish(self._status, self._counts, files, self._faults)


def forget(settings: WorkerSettings, batch: Batch) -> None:
    """Remove the local folder of a batch that has ended, unless another process is using it."""
    folder = settings.folder_of(batch)
    if folder.exists():
        with suppress(JobBusy), JobFolder.held(folder / _JOB):
            shutil.rmtree(folder, ignore_errors=True)
