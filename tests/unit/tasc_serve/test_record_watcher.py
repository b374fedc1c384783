"""What a watcher of records takes in where versions come faster than it looks."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tasc_draft import DraftSettings
from tasc_engine.errors import GuideError
from tasc_serve.errors import AdapterRefused
from tasc_serve.record_watcher import RecordWatcher
from tasc_serve.records import MOST_KNOWN, Records
from tasc_store import TaskRecord

RECORD = TaskRecord("greet", "model", "f" * 32, "{input}")


class Tasks:
    """A register whose versions come all at once. None: unreadable."""

    def __init__(self) -> None:
        self.records: list[TaskRecord | None] = [RECORD]

    def versions(self, name: str) -> list[int]:
        return list(range(1, len(self.records) + 1))

    def get(self, name: str, version: int) -> TaskRecord:
        if (record := self.records[version - 1]) is None:
            raise ValueError("unreadable")
        return record


class Worker:
    def __init__(self) -> None:
        self.records, self.record = Records(RECORD, 1), RECORD
        self.engine = SimpleNamespace(longest=9, guides=SimpleNamespace(of=self._guide))
        self.proposer, self.target_number = SimpleNamespace(index=None), 0
        self.loaded: list[str | None] = []

    @property
    def record_version(self) -> int:
        return self.records.newest[1]

    def proposer_for(self, record: TaskRecord, index: None) -> None:
        if record.draft.mixture == "tasc":
            raise ValueError("cannot be drafted so")

    def target_for(self, record: TaskRecord) -> str | None:
        if self.records.target_of(record) is not None:
            return None
        self.loaded.append(record.adapter)
        if record.adapter == "broken":
            raise AdapterRefused("adapter broken: it is")
        return record.adapter

    def take(self, record: TaskRecord, version: int, target: str | None, proposer: None) -> None:
        number = None if target is None else len(self.loaded)
        self.records.add(record, version, number)
        self.target_number = self.records.target_of(self.records.newest[0])

    def let_go(self, target: int) -> bool:
        self.records.forget(target)
        return True

    def _guide(self, spec: Any, longest: int) -> None:
        if spec.text == "bad":
            raise GuideError("bad")


class Loop:
    def between_steps(self, action: Callable[[], None]) -> None:
        action()


def watched(
    published: list[TaskRecord | None], done: Callable[[Worker], bool], keep_s: float = 60.0
) -> Worker:
    """A worker that served version 1 when all of these were published in one moment."""
    worker, tasks = Worker(), Tasks()
    watcher = RecordWatcher(worker, Loop(), tasks, 0.005, keep_s)
    tasks.records = [RECORD, *published]
    deadline = time.monotonic() + 10
    try:
        while not done(worker):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        watcher.close()
    return worker


def told(count: int) -> list[TaskRecord | None]:
    return [replace(RECORD, max_tokens=tokens) for tokens in range(1, count + 1)]


def test_a_version_that_came_between_two_looks_is_known() -> None:
    worker = watched(told(2), lambda worker: worker.record_version == 3)
    assert worker.records.of(2).max_tokens == 1
    assert worker.records.of(3).max_tokens == 2


def test_of_many_versions_the_newest_are_known() -> None:
    count = 3 * MOST_KNOWN
    worker = watched(told(count), lambda worker: worker.record_version == count + 1)
    assert len(worker.records.older) == MOST_KNOWN - 1
    assert worker.records.older[-1] == count


def test_what_cannot_be_used_between_two_looks_holds_nothing_up() -> None:
    published = [None, replace(RECORD, regex="bad"), replace(RECORD, model="other"), *told(1)]
    worker = watched(published, lambda worker: worker.record_version == 5)
    assert worker.records.older == (1,)


def test_the_last_good_version_is_used_where_the_newest_is_not() -> None:
    published = [*told(1), replace(RECORD, regex="bad")]
    worker = watched(published, lambda worker: worker.record_version == 2)
    assert 3 not in worker.records


def test_adapters_are_loaded_once_and_those_of_before_are_let_go() -> None:
    published = [replace(RECORD, adapter="new"), replace(RECORD, adapter="new", max_tokens=3)]
    worker = watched(published[:1], lambda worker: worker.record_version == 2)
    assert (worker.loaded, worker.records.older) == (["new"], (1,)), "kept for others' answers"
    worker = watched(published, lambda worker: worker.records.newest[1] == 3, keep_s=0.0)
    assert worker.loaded == ["new"]
    worker = watched(published, lambda worker: 3 in worker.records and not worker.records.older, 0)
    assert worker.records.target_of(RECORD) is None


@pytest.mark.parametrize("broken", [{"adapter": "broken"}, {"draft": DraftSettings("tasc")}])
def test_what_cannot_be_loaded_is_told_once_with_the_way_out_and_the_next_is_taken(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker, tasks = Worker(), Tasks()
    watcher = RecordWatcher(worker, Loop(), tasks, 0.005, 60.0)
    tasks.records.append(replace(RECORD, **broken))
    for published, told in ((None, "version 2"), (replace(RECORD, adapter="good"), "version 3")):
        tasks.records += [published] if published else []
        deadline = time.monotonic() + 10
        while told not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            caplog.set_level("INFO")
    watcher.close()
    (said,) = [r.getMessage() for r in caplog.records if "version 1 stays in use" in r.getMessage()]
    assert "go back with `tasc task use greet 1`" in said
    assert worker.loaded[-1] == "good"
    assert worker.records.older == (1,)
