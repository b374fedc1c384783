"""Batch jobs that may be killed at any moment: started again, one does only what is missing.

It says what a job was begun with and that nobody else works on it; `Job` does the work.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing

import redis

from tasc_jobs.batch import folder as folders
from tasc_jobs.batch.folder import Begun, JobFolder, require_same
from tasc_jobs.batch.pool import EngineSpec, Pool
from tasc_jobs.batch.preview import Preview
from tasc_jobs.batch.start import Finish, Job
from tasc_jobs.batch.work import JobProgress, JobReport, JobSpec, Row, Strategy
from tasc_jobs.errors import JobError
from tasc_jobs.runtime.ray_local import require_ray
from tasc_runtime.engine.builder import Pinned
from tasc_store import ArtifactStore, JobResults, TaskRecord, TaskStore, connect

log = logging.getLogger(__name__)


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
        StoreError: Redis was away for ``store_wait_s``.
        EngineFailed: Engines cannot be built, or died without the store.
        JobError: They die again and again.
    """
    require_ray()
    with closing(connect(spec.url)) as client, ExitStack() as stack:
        TaskStore(client).versions(spec.task)  # an unknown task is said before anything is made
        held = stack.enter_context(JobFolder.held(spec.folder))
        if spec.restart:
            _forget(spec, held)
        begun = held.begun()
        if begun is None:
            begun = held.begin(spec.pins, *_versions(spec))
        require_same(begun, spec.pins, spec.folder)
        if begun.report is not None:
            held.end(begun, begun.report)
            return JobReport(**{**begun.report, "resumed": begun.report["rows"]})
        begun = _with_index(client, spec.task, held, begun)
        results = JobResults(client, spec.task, begun.id)
        pinned = Pinned(begun.record_version, begun.index_version)
        engine = _engine(spec, pinned, begun.id, strategy)
        job = Job(spec, held, begun, results, engine, progress)
        source = rows()
        try:
            return job.run(source, finish, should_stop)
        finally:
            if isinstance(source, Generator):
                source.close()


def preview_job(spec: JobSpec, rows: Sequence[Row], strategy: Strategy) -> Preview:
    """Answer a few rows with drafts and without, and time it; nothing is written.

    Raises:
        RaySetupError: Ray is not running in this process.
        UnknownTask: There is no such task.
        JobError: No engine can be built, or it takes longer than ``stall_s``.
    """
    require_ray()
    engine = _engine(spec, Pinned(*_versions(spec)), "preview", strategy)
    pool = Pool(engine, 1, spec.actor_cpus, lambda rows: None)
    with closing(pool):
        return pool.preview(rows, spec.stall_s)


def discard(spec: JobSpec) -> None:
    """Forget a job: its folder, and what it has in Redis.

    Raises:
        JobBusy: A process works on it.
        StoreError: Redis fails.
    """
    with JobFolder.held(spec.folder) as held:
        _forget(spec, held)
        folders.remove(spec.folder)


def _engine(spec: JobSpec, pinned: Pinned, job: str, strategy: Strategy) -> EngineSpec:
    return EngineSpec(
        spec.url, spec.task, pinned, spec.engine, strategy, job, spec.actor_gpus, spec.store_wait_s
    )


def _forget(spec: JobSpec, held: JobFolder) -> None:
    try:
        begun = held.begun()
    except JobError:  # nobody can say what it has in Redis; that goes by itself
        begun = None
    if begun is not None:
        with closing(connect(spec.url)) as client:
            JobResults(client, spec.task, begun.id).clear()
    held.discard()


def _versions(spec: JobSpec) -> tuple[int, int | None]:
    """Of the task's record and its draft index, as they are now."""
    with closing(connect(spec.url)) as client:
        tasks = TaskStore(client)
        version = tasks.versions(spec.task)[-1]
        return version, _current(_indexes(client, tasks.get(spec.task, version)))


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
