"""Batch jobs that may be killed at any moment: started again, one does only what is missing.

Engines answer rows, and each finished row is appended at once to the job's folder. The output is
written from there when all rows are finished. A job does not know what its rows ask for or what
its output looks like.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import TypeAlias

import ray
import redis

from tasc_jobs.batch.engines import EngineSpec, Pool, Preview, Window
from tasc_jobs.batch.folder import Begun, JobFolder, require_same
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
from tasc_jobs.ray_local import require_ray
from tasc_runtime.engine.builder import Pinned
from tasc_store import ArtifactStore, TaskRecord, TaskStore, connect

log = logging.getLogger(__name__)

_READ_ROWS = 512  # of the input in one turn
_WAIT_S = 0.2
_TOLD_S = 0.5

Finish: TypeAlias = Callable[[Iterable[Record], bool], None]
"""Writes the final files from records in order; told whether these are all of them."""


def run_job(
    spec: JobSpec,
    rows: Callable[[], Iterator[Row]],
    strategy: Strategy,
    finish: Finish,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[JobProgress], None] = lambda progress: None,
) -> JobReport:
    """Answer all rows, those left out that an earlier start has answered, and finish.

    Where the index of an earlier start is gone it goes on with the current one: an index makes
    answers faster, never others.

    Args:
        rows: Opens the input: the same rows in the same order each time.
        finish: Called with all records at the end, or with what there is where the job was stopped
            or had too many errors; it may be called again with the same ones.
        should_stop: Asked some times a second.
        progress: Told about once a second.

    Raises:
        RaySetupError: Ray is not running in this process.
        JobBusy: Another process works on the job.
        JobChanged: The job has begun with other pins.
        JobStalled: Nothing was finished for ``stall_s``.
        TooManyErrors: More rows than ``max_errors`` have no answer.
        UnknownTask, UnknownVersion: There is no such task, or its record's version of the first
            start is gone.
        StoreError: Redis fails when the job starts.
        EngineFailed: Engines cannot be built.
        JobError: They die again and again, or finished records are damaged before the end.
    """
    require_ray()
    with closing(connect(spec.url)) as client, ExitStack() as stack:
        TaskStore(client).versions(spec.task)  # an unknown task is said before anything is made
        held = stack.enter_context(JobFolder.held(spec.folder))
        if spec.restart:
            held.discard()
        begun = held.begun()
        if begun is None:
            begun = held.begin(spec.pins, *_versions(client, spec.task))
        require_same(begun, spec.pins, spec.folder)
        if begun.report is not None:
            held.end(begun, begun.report)
            return JobReport(**{**begun.report, "resumed": begun.report["rows"]})
        begun = _with_index(client, spec.task, held, begun)
        pinned = Pinned(begun.record_version, begun.index_version)
        job = _Job(spec, held, _pool(spec, spec.actors, pinned, strategy), progress)
        source = rows()
        try:
            report = job.run(source, finish, should_stop)
        finally:
            if isinstance(source, Generator):
                source.close()
        if not report.stopped:
            held.end(begun, asdict(report))
        return report


def preview_job(spec: JobSpec, rows: Sequence[Row], strategy: Strategy) -> Preview:
    """Answer a few rows with drafts and without, and time it; nothing is written.

    Raises:
        RaySetupError: Ray is not running in this process.
        UnknownTask: There is no such task.
        JobError: No engine can be built, or it takes longer than ``stall_s``.
    """
    require_ray()
    with closing(connect(spec.url)) as client:
        pinned = Pinned(*_versions(client, spec.task))
    with closing(_pool(spec, 1, pinned, strategy)) as pool:
        return pool.preview(rows, spec.stall_s)


class _Job:
    """One start of a job."""

    def __init__(
        self,
        spec: JobSpec,
        held: JobFolder,
        pool: Pool,
        progress: Callable[[JobProgress], None],
    ) -> None:
        self._spec, self._folder, self._pool, self._progress = spec, held, pool, progress
        self._window = Window(iter(()))
        self._resumed = 0
        self._moved = time.monotonic()
        self._told = 0.0

    def run(
        self, source: Iterator[Row], finish: Finish, should_stop: Callable[[], bool]
    ) -> JobReport:
        first, behind = self._folder.resume()
        self._window = Window(source, first, behind, self._spec.window_rows)
        totals = self._folder.totals
        self._resumed = totals.rows
        self._tell()  # of what is done from now on, earlier starts' rows are no part
        stopped = should_stop()
        try:
            while not self._window.empty and not stopped:
                self._require_few_errors(finish)
                self._turn()
                self._require_movement()
                stopped = should_stop()
            self._require_few_errors(finish)
        finally:
            self._pool.close()
        self._tell()
        stopped = not self._window.empty
        finish(self._folder.records(whole=not stopped), not stopped)
        return JobReport(
            totals.rows,
            totals.errors,
            totals.tokens,
            totals.steps,
            totals.first_error,
            stopped,
            self._resumed,
        )

    def _turn(self) -> None:
        entered, up = self._window.read(_READ_ROWS), self._pool.up
        self._keep([Record.of(row, None, row.refused) for row in entered or () if row.refused])
        records = self._pool.turn(self._window, 0.0 if self._window.has_room else _WAIT_S)
        self._keep(records)
        if records or entered is not None or self._pool.up > up:
            self._moved = time.monotonic()
        if time.monotonic() - self._told >= _TOLD_S:
            self._tell()

    def _keep(self, records: Sequence[Record]) -> None:
        if new := self._window.finish(records):
            self._folder.add(new)

    def _tell(self) -> None:
        self._told = time.monotonic()
        totals = self._folder.totals
        self._progress(
            JobProgress(
                totals.rows,
                self._resumed,
                self._spec.total,
                totals.errors,
                totals.tokens,
                totals.steps,
                self._pool.up,
                self._pool.held,
            )
        )

    def _require_few_errors(self, finish: Finish) -> None:
        most, totals = self._spec.max_errors, self._folder.totals
        if most is None or totals.errors <= most:
            return
        finish(self._folder.records(), False)
        first = f" (first: {' '.join((totals.first_error or '').split())})"
        raise TooManyErrors(
            f"{totals.errors} of {totals.rows} rows have no answer{first}, and --max-errors is "
            f"{most}; raise it and run the job again, which goes on where it was, or mend the"
            " input and add --restart"
        )

    def _require_movement(self) -> None:
        stalled = time.monotonic() - self._moved
        if stalled < self._spec.stall_s:
            return
        up, size, held = self._pool.up, self._spec.actors, self._pool.held
        free = ray.available_resources() if not up else {}
        room = f"; the cluster has {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free"
        raise (JobStalled if up else NoEngine)(
            f"no row was finished for {stalled:.0f} s: {up} of {size} engines are up, {held} rows "
            f"are with them{room if not up else ''}. Run the job again, it goes on where it was; "
            "if rows may take that long, raise --stall-timeout"
        )


def _pool(spec: JobSpec, size: int, pinned: Pinned, strategy: Strategy) -> Pool:
    engine = EngineSpec(spec.url, spec.task, pinned, spec.engine, strategy, spec.actor_gpus)
    return Pool(engine, size, spec.actor_cpus)


def _versions(client: redis.Redis, task: str) -> tuple[int, int | None]:
    """Of the task's record and its draft index, as they are now."""
    tasks = TaskStore(client)
    version = tasks.versions(task)[-1]
    return version, _current(_indexes(client, tasks.get(task, version)))


def _with_index(client: redis.Redis, task: str, held: JobFolder, begun: Begun) -> Begun:
    """The job, with the current index where the one that it was begun with is gone."""
    store = _indexes(client, TaskStore(client).get(task, begun.record_version))
    if begun.index_version is None or begun.index_version in store.versions():
        return begun
    current = _current(store)
    log.warning("task %s: index %d is gone; going on with %s", task, begun.index_version, current)
    return held.repin(begun, current)


def _indexes(client: redis.Redis, record: TaskRecord) -> ArtifactStore:
    return ArtifactStore(client, record.corpus_name, record.fingerprint)


def _current(store: ArtifactStore) -> int | None:
    current = store.current()
    return current.version if current else None
