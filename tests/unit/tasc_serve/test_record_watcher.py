"""What a watcher of records takes in where versions come faster than it looks."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tasc_engine.errors import GuideError
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

    @property
    def record_version(self) -> int:
        return self.records.newest[1]

    def _guide(self, spec: Any, longest: int) -> None:
        if spec.text == "bad":
            raise GuideError("bad")


def watched(published: list[TaskRecord | None], done: Callable[[Worker], bool]) -> Worker:
    """A worker that served version 1 when all of these were published in one moment."""
    worker, tasks = Worker(), Tasks()
    watcher = RecordWatcher(worker, tasks, 0.005)
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
