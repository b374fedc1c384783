"""Tests that a job resumes without its records, its index or its settings at the start.

The engines are stand-ins that answer in this process; the store is real.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support import refused
from tasc_jobs.batch import job
from tasc_jobs.batch.engines import EngineSpec, ReorderBuffer
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.job import run_job
from tasc_jobs.batch.work import JobReport, JobSpec, Record, Row, TooManyErrors
from tasc_jobs.errors import JobError
from tasc_store import ArtifactStore, TaskRecord, TaskStore, UnknownVersion

pytestmark = pytest.mark.redis
ROWS, ROWS_PER_POLL = 12, 4
MAX_POLLS = 50


class Engines:
    """Answers some rows per call, the last one first; rows below ``failing`` get an error."""

    made: list["Engines"]
    failing = 0
    running, rows_in_flight = 1, 0

    def __init__(self, spec: EngineSpec, size: int, cpus: float) -> None:
        self.spec, self.polls, self.rows = spec, 0, 0
        self.made.append(self)

    def poll(self, buffer: ReorderBuffer, wait_s: float) -> list[Record]:
        self.polls += 1
        assert self.polls < MAX_POLLS, "the job never ends"
        rows = buffer.take(ROWS_PER_POLL)
        self.rows += len(rows)
        return [self._record(row) for row in reversed(rows)]

    def close(self) -> list[int]:
        return []

    def _record(self, row: Row) -> Record:
        if row.ordinal < self.failing:
            return Record.of(row, None, "it broke")
        return Record.of(row, {"row": row.ordinal}, None, 1, 1)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Engines]:
    found = type("Engines", (Engines,), {"made": []})
    monkeypatch.setattr(job, "Pool", found)
    monkeypatch.setattr(job, "require_ray", lambda: None)
    return found


@pytest.fixture
def indexes(client: redis.Redis, task: str, tmp_path: Path) -> ArtifactStore:
    """A task with two indexes; the older one is current."""
    TaskStore(client).put(TaskRecord(task, "m", "f", "{input}"))
    store = ArtifactStore(client, task, "f")
    (tmp_path / "index").write_bytes(b"whatever")
    for _ in range(2):
        store.publish(tmp_path / "index", 1)
    store.announce(1)
    return store


@pytest.fixture
def spec(redis_url: str, task: str, indexes: ArtifactStore, tmp_path: Path) -> JobSpec:
    return JobSpec(redis_url, task, tmp_path / "job", {}, window_rows=ROWS_PER_POLL)


def rows() -> Iterator[Row]:
    return (Row(i, f"r{i}", "say", i + 1) for i in range(ROWS))


def answered(spec: JobSpec, engines: type[Engines], turns: int = MAX_POLLS) -> list[Record]:
    """Runs the job for ``turns`` turns of its engines; returns its records, checked for order."""
    found, starts = list[Record](), len(engines.made)

    def finish(records: Iterable[Record], whole: bool) -> None:
        found.extend(records)

    run_job(spec, rows, None, finish, should_stop=lambda: engines.made[starts].polls >= turns)
    assert [record.ordinal for record in found] == list(range(len(found)))
    return found


ANSWERS = [{"row": i} for i in range(ROWS)]


@pytest.mark.parametrize("kept", [0, 1, 5, 7])
def test_rows_of_lost_records_are_answered_again(
    spec: JobSpec, engines: type[Engines], kept: int
) -> None:
    assert len(answered(spec, engines, turns=2)) == 2 * ROWS_PER_POLL
    (file,) = spec.folder.glob("records*")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + lines[kept][:9])
    assert [r.content for r in answered(spec, engines)] == ANSWERS
    assert engines.made[-1].rows == ROWS - kept


def test_record_damaged_before_the_end_fails_the_job_but_keeps_the_output(
    spec: JobSpec, engines: type[Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(pool: Engines) -> list[int]:
        """Damages the records when all rows are answered, before the output is written."""
        (file,) = spec.folder.glob("records*")
        content = bytearray(file.read_bytes())
        content[content.index(b"\n") + 1] = 0
        file.write_bytes(content)
        return []

    with monkeypatch.context() as failing:
        failing.setattr(engines, "close", damage)
        with pytest.raises(JobError):
            answered(spec, engines)
    assert [r.content for r in answered(spec, engines)] == ANSWERS
    assert engines.made[-1].rows == ROWS - 1


def test_job_with_a_deleted_index_resumes_with_the_current_index(spec, engines, indexes):
    answered(spec, engines, turns=1)
    indexes.announce(2)
    answered(spec, engines, turns=1)
    indexes.delete(1)
    assert len(answered(spec, engines)) == ROWS
    assert [made.spec.pinned.index_version for made in engines.made] == [1, 1, 2]
    assert [made.rows for made in engines.made] == [ROWS_PER_POLL] * 3, "finished rows stay"
    assert JobFolder(spec.folder).begun().index_version == 2


def test_job_of_a_deleted_task_version_fails_before_engines_start(client, spec, engines, task):
    tasks = TaskStore(client)
    tasks.put(TaskRecord(task, "n", "f", "{input}"))
    answered(spec, engines, turns=1)
    tasks.delete(task)
    tasks.put(TaskRecord(task, "m", "f", "{input}"))
    with pytest.raises(UnknownVersion):
        answered(spec, engines)
    assert len(engines.made) == 1


def test_job_with_a_damaged_first_record_starts_again(
    spec: JobSpec, engines: type[Engines]
) -> None:
    answered(spec, engines, turns=1)
    (spec.folder / "job.json").write_text("{")
    assert len(answered(replace(spec, restart=True), engines)) == ROWS
    assert engines.made[-1].rows == ROWS


def test_too_many_errors_end_the_job_at_once(spec: JobSpec, engines: type[Engines]) -> None:
    engines.failing = 3
    strict = replace(spec, window_rows=ROWS, max_errors=2)
    with refused(TooManyErrors, "row 1: it broke"):
        answered(strict, engines)
    assert engines.made[0].polls == 1
    assert len(answered(replace(strict, max_errors=3), engines)) == ROWS


@pytest.mark.parametrize("max_errors", [ROWS - 1, ROWS])
def test_job_without_any_answer_fails(
    spec: JobSpec, engines: type[Engines], max_errors: int
) -> None:
    engines.failing = ROWS
    strict = replace(spec, window_rows=ROWS, max_errors=max_errors)
    with refused(TooManyErrors, f"none of {ROWS} rows", "row 1: it broke", "--restart"):
        answered(strict, engines)
    with pytest.raises(TooManyErrors):
        answered(strict, engines)
    assert engines.made[1].rows == 0, "finished rows stay"
    assert len(answered(replace(spec, restart=True), engines)) == ROWS, "a batch has no such limit"


class Repeatable:
    def is_repeatable(self, record: TaskRecord) -> bool:
        return True


def test_copies_and_their_number_stay_over_starts_and_failed_rows_count_once(
    spec: JobSpec, engines: type[Engines]
) -> None:
    """All rows are equal. The first one fails, and the rows that wait for it are sent."""
    engines.failing = 1
    spec = replace(spec, dedupe_bytes=1 << 20, max_errors=1)
    found = list[Record]()

    def finish(records: Iterable[Record], whole: bool) -> None:
        found[:] = records

    def run(least: int) -> JobReport:
        def should_stop() -> bool:
            return len(engines.made) > starts and engines.made[starts].polls >= least

        starts = len(engines.made)
        return run_job(spec, rows, Repeatable(), finish, should_stop=should_stop)

    stopped = run(2)
    assert (stopped.rows, stopped.errors, stopped.repeats) == (5, 1, 0)
    report = run(MAX_POLLS)
    assert (report.rows, report.errors, report.resumed) == (ROWS, 1, 5)
    assert [made.rows for made in engines.made] == [5, 1]
    assert (report.repeats, report.tokens) == (ROWS - 6, 5)
    assert [record.id for record in found] == [f"r{i}" for i in range(ROWS)]
    assert (found[0].error, found[0].content) == ("it broke", None)
    assert all(record.content for record in found[1:])
    assert run(0) == replace(report, resumed=ROWS), "the report of a finished job is kept"


def test_input_of_blank_lines_has_no_rows(spec: JobSpec, engines: type[Engines]) -> None:
    with refused(JobError, "no rows"):
        run_job(replace(spec, max_errors=9), lambda: iter(()), None, lambda records, whole: None)
