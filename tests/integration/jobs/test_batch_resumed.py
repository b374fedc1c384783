"""A job goes on whatever was taken from it between two starts: parts, its index, its beginning.

What stands for the engines here answers in this process; the store is real.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tasc_jobs.batch import JobSpec, discard, run_job, runner
from tasc_jobs.batch import start as job
from tasc_jobs.batch.errors import TooManyErrors
from tasc_jobs.batch.folder import JobFolder
from tasc_jobs.batch.pool import EngineSpec
from tasc_jobs.batch.window import Saved, Window
from tasc_jobs.batch.work import Record, Row
from tasc_store import (
    ArtifactStore,
    JobResults,
    StoreUnreachable,
    TaskRecord,
    TaskStore,
    UnknownVersion,
    connect,
)

pytestmark = pytest.mark.redis
ROWS, PART = 12, 4
MOST_TURNS = 50
ERROR = "it broke"


class Engines:
    """Answers a part's rows a turn; those below ``failing`` with an error, told as a dead one's."""

    made: list["Engines"]
    failing = 0
    up, held = 1, 0

    def __init__(
        self, spec: EngineSpec, size: int, cpus: float, lost: Callable[[set[int]], None]
    ) -> None:
        self.spec, self.lost, self.turns, self.rows = spec, lost, 0, 0
        self.results = JobResults(connect(spec.url), spec.task, spec.job)
        self.made.append(self)

    def turn(self, window: Window, wait_s: float) -> bool:
        self.turns += 1
        assert self.turns < MOST_TURNS, "the job never ends"
        rows = [row.ordinal for row in window.take(PART)]
        self.rows += len(rows)
        self.results.put([(row, self._entry(row)) for row in rows])
        failed = {row for row in rows if row < self.failing}
        self.lost(failed)
        return window.save(Saved(row) for row in rows if row not in failed) > 0

    def close(self) -> None:
        pass

    def _entry(self, row: int) -> str:
        said = {"error": ERROR, "content": None} if row < self.failing else {"error": None}
        return json.dumps({"content": {"row": row}, "tokens": 1, "steps": 1, **said})


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Engines]:
    found = type("Engines", (Engines,), {"made": []})
    monkeypatch.setattr(job, "Pool", found)
    monkeypatch.setattr(runner, "require_ray", lambda: None)
    return found


@pytest.fixture
def indexes(client: redis.Redis, task: str, tmp_path: Path) -> ArtifactStore:
    """A task with two indexes, of which the older one is current."""
    TaskStore(client).put(TaskRecord(name=task, model="m", fingerprint="f", template="{input}"))
    store = ArtifactStore(client, task, "f")
    (tmp_path / "index").write_bytes(b"whatever")
    for _ in range(2):
        store.publish(tmp_path / "index", 1)
    store.announce(1)
    return store


@pytest.fixture
def spec(redis_url: str, task: str, indexes: ArtifactStore, tmp_path: Path) -> JobSpec:
    return JobSpec(
        redis_url, task, tmp_path / "job", {}, part_rows=PART, max_unflushed=PART, store_wait_s=0
    )


def rows() -> Iterator[Row]:
    return (Row(i, f"r{i}", "say", i + 1) for i in range(ROWS))


def answered(spec: JobSpec, parts: int = ROWS) -> list[Record]:
    """Run the job until it has so many parts; its records, which must be in order."""
    found: list[Record] = []

    def finish(records: Iterator[Record], whole: bool) -> None:
        found.extend(records)

    def enough() -> bool:
        return len(list(spec.folder.glob("part-*"))) >= parts

    strategy: Any = None
    run_job(spec, rows, strategy, finish, should_stop=enough)
    assert [record.ordinal for record in found] == list(range(len(found)))
    return found


@pytest.mark.parametrize("gone", [0, 1])
def test_rows_of_a_part_that_was_deleted_are_answered_anew(
    spec: JobSpec, engines: type[Engines], gone: int
) -> None:
    assert len(answered(spec, parts=2)) == 2 * PART
    sorted(spec.folder.glob("part-*"))[gone].unlink()
    assert [r.content for r in answered(spec)] == [{"row": i} for i in range(ROWS)]


def test_a_job_whose_index_is_gone_goes_on_with_the_current_one(
    spec: JobSpec, engines: type[Engines], indexes: ArtifactStore
) -> None:
    answered(spec, parts=1)
    indexes.announce(2)
    answered(spec, parts=2)
    indexes.delete(1)
    assert len(answered(spec)) == ROWS
    assert [made.spec.pinned.index_version for made in engines.made] == [1, 1, 2]
    assert len({made.spec.job for made in engines.made}) == 1
    assert engines.made[-1].rows == PART, "what was finished stays"
    begun = JobFolder(spec.folder).begun()
    assert begun is not None
    assert begun.index_version == 2


def test_a_job_whose_record_is_gone_says_so_before_any_engine(
    client: redis.Redis, spec: JobSpec, engines: type[Engines], task: str
) -> None:
    TaskStore(client).put(TaskRecord(name=task, model="n", fingerprint="f", template="{input}"))
    answered(spec, parts=1)
    TaskStore(client).delete(task)
    TaskStore(client).put(TaskRecord(name=task, model="m", fingerprint="f", template="{input}"))
    with pytest.raises(UnknownVersion, match="not 2"):
        answered(spec)
    assert len(engines.made) == 1


def test_a_job_whose_beginning_is_damaged_can_be_begun_anew_and_be_forgotten(
    spec: JobSpec, engines: type[Engines]
) -> None:
    for again in (lambda: answered(JobSpec(**{**vars(spec), "restart": True})), None):
        answered(spec, parts=1)
        (spec.folder / "job.json").write_text("{")
        if again:
            assert len(again()) == ROWS
            discard(spec)
    discard(spec)
    assert not spec.folder.exists()


def test_errors_of_an_engine_that_died_count_at_once(spec: JobSpec, engines: type[Engines]) -> None:
    engines.failing = 3
    wide = JobSpec(**{**vars(spec), "max_unflushed": ROWS, "part_rows": ROWS, "max_errors": 2})
    with pytest.raises(TooManyErrors, match=rf"3 of 4 rows .*{ERROR}"):
        answered(wide)
    assert engines.made[0].turns == 1


def test_a_job_that_is_done_is_done_where_the_store_is_away_by_then(
    spec: JobSpec, engines: type[Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(results: JobResults) -> None:
        raise StoreUnreachable("away")

    monkeypatch.setattr(JobResults, "clear", away)
    assert len(answered(spec)) == ROWS
    begun = JobFolder(spec.folder).begun()
    assert begun is not None
    assert begun.report is not None
