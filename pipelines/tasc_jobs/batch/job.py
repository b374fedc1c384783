"""Batch jobs that may be killed at any moment; a restarted job only does the remaining work.

Engines answer rows, and each finished row is appended at once to the job's folder. When all rows
are finished, the output is written from these records. The caller defines the requests of a row
(`Strategy`) and the format of the output (`Finish`).
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict
from typing import TypeAlias, TypeVar

import ray
import redis

from tasc_jobs.batch.engines import EngineSpec, Pool, Queue, ReorderBuffer
from tasc_jobs.batch.folder import Begun, JobFolder, JobState
from tasc_jobs.batch.repeats import Repeats
from tasc_jobs.batch.work import (
    JobProgress,
    JobReport,
    JobSpec,
    JobStalled,
    NoEngine,
    Record,
    Row,
    Strategy,
    TooManyErrors,
)
from tasc_jobs.errors import JobError
from tasc_jobs.preview import Preview
from tasc_jobs.ray_local import require_ray
from tasc_runtime.engine.versions import Pinned
from tasc_store import ArtifactStore, TaskRecord, TaskStore, connect

log = logging.getLogger(__name__)

_READ_ROWS = 512  # rows read from the input per iteration
_WAIT_S = 0.2
_REPORT_S = 0.5

S = TypeVar("S", bound=JobState)
Finish: TypeAlias = Callable[[Iterable[Record], bool], None]
"""Writes the final files from records in order. The flag is True if the records are complete."""


def run_job(
    spec: JobSpec,
    rows: Callable[[], Iterator[Row]],
    strategy: Strategy,
    finish: Finish,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
) -> JobReport:
    """Answer all rows that earlier runs of the job have not answered, then write the output.

    If the draft index of an earlier run was deleted, the job resumes with the current one. The
    answers do not change, because an index only affects speed.

    Args:
        rows: Opens the input. Must yield the same rows in the same order on every call.
        finish: Called with all records at the end. If the job was stopped or had too many errors,
            ``finish`` gets the records so far. It may be called more than once.
        should_stop: Polled several times per second; the job stops if it returns True.
        progress: Called about twice per second.

    Raises:
        RaySetupError: Ray is not running in this process.
        JobBusy: Another process is running the job.
        JobChanged: The job was started earlier with other pins.
        JobStalled: No row was finished for ``stall_s``.
        NoEngine: No engine was running for ``stall_s``.
        TooManyErrors: More than ``max_errors`` rows have no answer, or no row has one.
        UnknownTask, UnknownVersion: The task does not exist, or not in the version with which the
            job was started.
        StoreError: Redis fails when the job starts.
        EngineFailed: The engines cannot be built.
        JobError: Engines die repeatedly, or records are damaged while the job runs.
    """

    @contextmanager
    def queue(state: JobFolder, dedupe_bytes: int) -> Iterator[Queue]:
        source = rows()
        try:
            resumed, repeats = state.resume(), Repeats(dedupe_bytes)
            yield ReorderBuffer(source, *resumed, spec.window_rows, repeats)
        finally:
            if isinstance(source, Generator):
                source.close()

    return run(
        spec,
        JobFolder.held(spec.folder),
        queue,
        strategy,
        lambda engine, dedupe_bytes: engine,
        finish,
        should_stop=should_stop,
        progress=progress,
    )


def run(
    spec: JobSpec,
    held: AbstractContextManager[S],
    queue: Callable[[S, int], AbstractContextManager[Queue]],
    strategy: Strategy,
    engines: Callable[[EngineSpec, int], EngineSpec],
    finish: Finish,
    *,
    should_stop: Callable[[], bool],
    progress: Callable[[JobProgress], None],
) -> JobReport:
    """Do what is missing of a job.

    Args:
        held: Locks the job's state.
        queue: Opens what is not finished yet, given the state and the memory for repeats.
        engines: Completes the specification of the engines, given the memory for repeats.

    See `run_job` for the other arguments and the errors.
    """
    require_ray()
    with closing(connect(spec.url)) as client, ExitStack() as stack:
        TaskStore(client).versions(spec.task)  # an unknown task fails before anything is created
        folder = stack.enter_context(held)
        if spec.restart:
            folder.discard()
        begun = folder.begun()
        if begun is None:
            begun = folder.begin(spec.pins, *_versions(client, spec.task))
        folder.require_same(begun, spec.pins)
        if begun.report is not None:
            folder.end(begun, begun.report)
            return JobReport(**{**begun.report, "resumed": begun.report["rows"]})
        record = TaskStore(client).get(spec.task, begun.record_version)
        begun = _with_index(client, record, folder, begun)
        pinned = Pinned(begun.record_version, begun.index_version)
        may_copy = spec.dedupe_bytes > 0 and strategy.is_repeatable(record)
        dedupe_bytes = spec.dedupe_bytes if may_copy else 0
        with queue(folder, dedupe_bytes) as todo:
            engine = engines(_engine(spec, pinned, strategy), dedupe_bytes)
            pool = Pool(engine, spec.actors, spec.actor_cpus)
            report = _Job(spec, folder, pool, todo, progress).run(finish, should_stop)
        if not report.stopped:
            folder.end(begun, asdict(report))
        return report


def preview_job(spec: JobSpec, rows: Sequence[Row], strategy: Strategy) -> Preview:
    """Answer a few rows with and without drafts, and measure the time. Writes nothing.

    Raises:
        RaySetupError: Ray is not running in this process.
        UnknownTask: The task does not exist.
        JobError: No engine can be built, or the answers take longer than ``stall_s``.
    """
    require_ray()
    with closing(connect(spec.url)) as client:
        pinned = Pinned(*_versions(client, spec.task))
    with closing(Pool(_engine(spec, pinned, strategy), 1, spec.actor_cpus)) as pool:
        return pool.preview(rows, spec.stall_s)


class _Job:
    """One run of a job, from its start until it ends or is killed."""

    def __init__(
        self,
        spec: JobSpec,
        folder: JobState,
        pool: Pool,
        queue: Queue,
        progress: Callable[[JobProgress], None],
    ) -> None:
        self._spec, self._folder, self._pool, self._progress = spec, folder, pool, progress
        self._buffer = queue
        self._resumed = folder.totals.rows
        self._last_progress_at = time.monotonic()
        self._reported_at = 0.0

    def run(self, finish: Finish, should_stop: Callable[[], bool]) -> JobReport:
        self._report_progress()  # the baseline: rows of earlier runs do not count for speed
        stopped = should_stop()
        try:
            while not self._buffer.empty and not stopped:
                self._require_few_errors(finish)
                self._advance()
                self._require_progress()
                stopped = should_stop()
            self._require_few_errors(finish, ended=self._buffer.empty)
        finally:
            self._buffer.requeue(self._pool.close())
        self._report_progress()
        stopped = not self._buffer.empty
        finish(self._folder.records(whole=not stopped), not stopped)
        return self._folder.totals.report(self._resumed, stopped=stopped)

    def _advance(self) -> None:
        entered = self._buffer.read(_READ_ROWS)
        engines_running = self._pool.running
        self._keep([Record.of(row, None, row.refused) for row in entered or () if row.refused])
        records = self._pool.poll(self._buffer, 0.0 if self._buffer.has_room else _WAIT_S)
        self._keep(records)
        if records or entered is not None or self._pool.running > engines_running:
            self._last_progress_at = time.monotonic()
        if time.monotonic() - self._reported_at >= _REPORT_S:
            self._report_progress()

    def _keep(self, records: Sequence[Record]) -> None:
        if new := self._buffer.finish(records):
            self._folder.add(new)

    def _report_progress(self) -> None:
        self._reported_at = time.monotonic()
        report = self._folder.totals.report(self._resumed)
        total = self._spec.total and max(self._spec.total, report.rows)  # it may be an estimate
        self._progress(JobProgress(report, total, self._pool.running, self._pool.rows_in_flight))

    def _require_few_errors(self, finish: Finish, *, ended: bool = False) -> None:
        max_errors, totals = self._spec.max_errors, self._folder.totals
        all_failed = ended and totals.errors == totals.rows
        if max_errors is None or (totals.errors <= max_errors and not all_failed):
            return
        if not totals.rows:
            raise JobError("the input has no rows, only blank lines; name another input")
        finish(self._folder.records(), False)
        first = f" (first: {' '.join((totals.first_error or '').split())})"
        if all_failed:
            raise TooManyErrors(
                f"none of {totals.rows} rows has an answer{first}; fix the input, "
                "or name its field with --input-field, and run the job again with --restart"
            )
        raise TooManyErrors(
            f"{totals.errors} of {totals.rows} rows {'' if ended else 'so far '}have no answer"
            f"{first}, but at most {max_errors} are allowed; fix the input, or the name of "
            "its field (--input-field), and add --restart, or raise --max-errors and run the job "
            "again to resume it"
        )

    def _require_progress(self) -> None:
        stalled = time.monotonic() - self._last_progress_at
        if stalled < self._spec.stall_s:
            return
        engines_running, rows_in_flight = self._pool.running, self._pool.rows_in_flight
        free = ray.available_resources() if not engines_running else {}
        room = f"; the cluster has {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"
        raise (JobStalled if engines_running else NoEngine)(
            f"no row was finished for {stalled:.0f} s: {engines_running} of {self._spec.actors} "
            f"engines are running, with {rows_in_flight} rows in flight"
            f"{'' if engines_running else room}. Run the job again to resume it; if rows may take "
            "that long, raise --stall-timeout"
        )


def _engine(spec: JobSpec, pinned: Pinned, strategy: Strategy) -> EngineSpec:
    return EngineSpec(spec.url, spec.task, pinned, spec.engine, strategy, spec.actor_gpus)


def _versions(client: redis.Redis, task: str) -> tuple[int, int | None]:
    """Returns the current versions of the task's record and of its draft index."""
    tasks = TaskStore(client)
    version = tasks.versions(task)[-1]
    return version, _current(_indexes(client, tasks.get(task, version)))


def _with_index(client: redis.Redis, record: TaskRecord, folder: JobState, begun: Begun) -> Begun:
    """Returns the job, switched to the current index if the job's index was deleted."""
    store = _indexes(client, record)
    if begun.index_version is None or begun.index_version in store.versions():
        return begun
    current = _current(store)
    log.warning(
        "task %s: index version %d was deleted; the job continues with %s",
        record.name,
        begun.index_version,
        f"version {current}" if current else "no index",
    )
    return folder.repin(begun, current)


def _indexes(client: redis.Redis, record: TaskRecord) -> ArtifactStore:
    return ArtifactStore(client, record.corpus_name, record.fingerprint)


def _current(store: ArtifactStore) -> int | None:
    current = store.current()
    return current.version if current else None
