"""Tests the watcher of records and indexes: its updates, messages and retries."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from support import eventually, refused
from tasc_draft import DraftSettings
from tasc_engine.errors import GuideError
from tasc_protocol import SamplingDefaults
from tasc_runtime.engine.versions import (
    Records,
    engine_digest,
    fixed_changes,
    newest_version,
)
from tasc_runtime.errors import ServiceError
from tasc_serve.replica import watchers
from tasc_serve.replica.watchers import TaskWatcher
from tasc_store import NeuralDrafting, TaskRecord
from tasc_text import ChatTemplate

RECORD = TaskRecord("greet", "model", "f" * 32, "{input}")


class Tasks:
    """A register whose versions come all at once. None: unreadable."""

    def __init__(self) -> None:
        self.records: list[TaskRecord | None] = [RECORD]
        self.looks = 0

    def versions(self, name: str) -> list[int]:
        self.looks += 1
        return list(range(1, len(self.records) + 1))

    def get(self, name: str, version: int) -> TaskRecord:
        if (record := self.records[version - 1]) is None:
            raise ValueError("unreadable")
        return record


class Worker:
    def __init__(self) -> None:
        self.records = Records(RECORD, 1)
        self.engine = SimpleNamespace(longest=9, guides=SimpleNamespace(of=self._guide))
        self.proposer = SimpleNamespace(index=None)
        self.artifact = self.announced = None  # of the index in use, and of the one to be used
        self.indexes = SimpleNamespace(
            store=SimpleNamespace(current=lambda: self.announced), fetch=lambda artifact: None
        )
        self.made = 0
        self._ready = self.pending = 0  # proposers made and not in use: now, and the most
        self.raising: list[Exception] = []

    @property
    def record(self) -> TaskRecord:
        return self.records.newest[0]

    @property
    def record_version(self) -> int:
        return self.records.newest[1]

    def proposer_for(self, record: TaskRecord, index: None) -> None:
        self.made += 1
        if record.draft.mixture == "tasc":
            raise ValueError("cannot be drafted so")
        self._ready += 1
        self.pending = max(self.pending, self._ready)

    def swap(self, artifact: Any, index: None, proposer: None) -> None:
        self._ready -= 1
        self.artifact = artifact

    def take(self, record: TaskRecord, version: int, proposer: None) -> None:
        if self.raising:
            raise self.raising.pop()
        self._ready -= 1
        self.records.add(record, version)

    def _guide(self, spec: Any, longest: int) -> None:
        if spec.text == "bad":
            raise GuideError("bad")


class Loop:
    """Like the real loop, it passes no exception of an action on."""

    def between_steps(self, action: Callable[[], None]) -> None:
        with suppress(Exception):
            action()


class LateLoop:
    """A loop with a slow step."""

    def between_steps(self, action: Callable[[], None]) -> None:
        threading.Timer(0.02, action).start()


@contextmanager
def watching(tasks: Tasks, worker: Worker, loop: Any = None) -> Iterator[None]:
    watcher = TaskWatcher(worker, loop or Loop(), tasks, 0.005)
    try:
        yield
    finally:
        watcher.close()


def watched(published: list[TaskRecord | None], done: Callable[[Worker], bool]) -> Worker:
    """Returns a worker that served version 1 when all of these were published at once."""
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker):
        tasks.records = [RECORD, *published]
        eventually(lambda: done(worker))
    return worker


def told(count: int) -> list[TaskRecord | None]:
    return [replace(RECORD, max_tokens=tokens) for tokens in range(1, count + 1)]


LIVE: dict[str, Any] = {
    "stop": ("x",),
    "max_tokens": 5,
    "sampling": SamplingDefaults(temperature=1.0),
    "choices": ("a",),
    "schema": "{}",
    "regex": "x",
    "draft": DraftSettings("tasc"),
}


@pytest.mark.parametrize("field", [field.name for field in fields(TaskRecord)])
def test_a_digest_changes_with_every_field_that_no_running_engine_can_change(field: str) -> None:
    others = {
        "dtype": "float64",
        "quantization": "int8",
        "fingerprint": "e" * 32,
        "template": "{input}!",
        "chat": ChatTemplate("{{ messages }}"),
        "neural": NeuralDrafting("d"),
        "adapters": (("a", "b"),),
        "allow_special_tokens_in_input": True,
    }
    changed = replace(RECORD, **{field: LIVE.get(field, others.get(field, "other"))})
    assert changed != RECORD
    assert (engine_digest(changed) == engine_digest(RECORD)) == (field in LIVE)
    assert fixed_changes(RECORD, changed) == ([] if field in LIVE else [field])


def test_of_a_digest_the_newest_readable_version_is_served() -> None:
    tasks = Tasks()
    adapted = replace(RECORD, adapter="new")
    tasks.records = [RECORD, replace(RECORD, max_tokens=5), adapted, None, adapted]
    assert newest_version(tasks, "greet")[1] == 5
    with refused(ServiceError, "greet", "another's", "args.revision"):
        newest_version(tasks, "greet", "another's")
    assert newest_version(tasks, "greet", engine_digest(RECORD)) == (tasks.records[1], 2)
    tasks.records[4] = replace(RECORD, template="{input}!")
    assert newest_version(tasks, "greet", engine_digest(adapted)) == (adapted, 3)


def test_a_version_that_came_between_two_looks_is_known() -> None:
    worker = watched(told(2), lambda worker: worker.record_version == 3)
    assert worker.records.of(2).max_tokens == 1
    assert worker.records.of(3).max_tokens == 2


def test_what_cannot_be_used_between_two_looks_holds_nothing_up() -> None:
    published = [None, replace(RECORD, regex="bad"), replace(RECORD, model="other"), *told(1)]
    worker = watched(published, lambda worker: worker.record_version == 5)
    assert worker.records.older == (1,)


def test_the_last_good_version_is_used_where_the_newest_is_not() -> None:
    published = [*told(1), replace(RECORD, regex="bad")]
    worker = watched(published, lambda worker: worker.record_version == 2)
    assert 3 not in worker.records


FIXED = [
    {"adapter": "new"},
    {"adapters": (("x", "new"),)},
    {"model": "m"},
    {"template": "{input}!"},
]


@pytest.mark.parametrize("changed", FIXED)
def test_what_needs_new_replicas_is_told_once_and_the_next_is_taken(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker):
        tasks.records.append(replace(RECORD, **changed))
        eventually(lambda: "version 2" in caplog.text)
        tasks.records += told(1)
        eventually(lambda: worker.record_version == 3)
    (said,) = [r.getMessage() for r in caplog.records if "version 2" in r.getMessage()]
    assert f"changes {next(iter(changed))}" in said
    assert "version 1 stays in use" in said
    assert worker.records.older == (1,)


def test_what_cannot_be_used_is_told_once_with_the_way_out_and_the_next_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchers, "AGAIN_S", 0.01)
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker):
        tasks.records.append(replace(RECORD, draft=DraftSettings("tasc")))
        eventually(lambda: worker.made > 2)
        tasks.records += told(1)
        eventually(lambda: worker.record_version == 3)
    (said,) = [r.getMessage() for r in caplog.records if "version 1 stays in use" in r.getMessage()]
    assert "go back with `tasc task use greet 1`" in said
    assert worker.records.older == (1,)


def test_a_change_that_fails_between_two_steps_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchers, "AGAIN_S", 0.01)
    worker, tasks = Worker(), Tasks()
    worker.raising = [RuntimeError("no row could be drafted for")]
    with watching(tasks, worker):
        tasks.records += told(1)
        eventually(lambda: worker.record_version == 2)
    assert "version 1 stays in use: no row could be drafted for" in caplog.text


def test_of_a_record_and_an_index_that_come_at_once_one_is_in_use_before_the_other_is_made() -> (
    None
):
    worker, tasks = Worker(), Tasks()
    tasks.records += told(1)
    worker.announced = SimpleNamespace(version=1)
    with watching(tasks, worker, LateLoop()):
        eventually(lambda: worker.artifact and worker.record_version == 2)
    assert (worker.made, worker.pending) == (2, 1)


def test_a_record_that_cannot_be_read_holds_no_index_up() -> None:
    worker, tasks = Worker(), Tasks()
    tasks.records.append(None)
    worker.announced = SimpleNamespace(version=1)
    with watching(tasks, worker):
        eventually(lambda: worker.artifact and tasks.looks > 3)
