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
from tasc_runtime.engine.versions import Records, engine_digest, fixed_changes, newest_version
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
        self.artifact = self.announced = None  # of the index in use and of the announced one
        self.indexes = SimpleNamespace(
            store=SimpleNamespace(current=lambda: self.announced), fetch=lambda artifact: None
        )
        self.made = 0
        self._ready = self.pending = 0  # unused proposers now, and their maximum
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
    """A loop that swallows exceptions of actions, like the real one; ``delay_s`` is a slow step."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def between_steps(self, action: Callable[[], None]) -> None:
        if self._delay_s:
            return threading.Timer(self._delay_s, action).start()
        with suppress(Exception):
            action()


@contextmanager
def watching(tasks: Tasks, worker: Worker, loop: Any = None) -> Iterator[None]:
    watcher = TaskWatcher(worker, loop or Loop(), tasks, 0.005)
    try:
        yield
    finally:
        watcher.close()


def versions_of(count: int) -> list[TaskRecord | None]:
    return [replace(RECORD, max_tokens=tokens) for tokens in range(1, count + 1)]


LIVE: dict[str, Any] = {
    "stop": ("x",),
    "max_tokens": 5,
    "sampling": SamplingDefaults(temperature=1.0),
    "choices": ("a",),
    "schema": "{}",
    "regex": "x",
    "draft": DraftSettings("tasc"),
    "label_end": ",",
    "abstain_below": 0.5,
    "label_temperature": 1.5,
    "calibrated_for": RECORD.scoring_fingerprint,
    "label_biases": (0.5,),
    "abstain_label": "unsure",
}


@pytest.mark.parametrize("field", [field.name for field in fields(TaskRecord)])
def test_digest_changes_with_every_field_that_needs_another_engine(field: str) -> None:
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
    before = replace(RECORD, calibrated_for=RECORD.scoring_fingerprint)
    before = RECORD if field != "label_temperature" else before
    changed = replace(before, **{field: LIVE.get(field, others.get(field, "other"))})
    assert changed != RECORD
    assert (engine_digest(changed) == engine_digest(RECORD)) == (field in LIVE)
    assert fixed_changes(before, changed) == ([] if field in LIVE else [field])


def test_newest_readable_version_of_a_digest_is_served() -> None:
    tasks = Tasks()
    adapted = replace(RECORD, adapter="new")
    tasks.records = [RECORD, replace(RECORD, max_tokens=5), adapted, None, adapted]
    assert newest_version(tasks, "greet")[1] == 5
    with refused(ServiceError, "greet", "another's", "args.revision"):
        newest_version(tasks, "greet", "another's")
    assert newest_version(tasks, "greet", engine_digest(RECORD)) == (tasks.records[1], 2)
    tasks.records[4] = replace(RECORD, template="{input}!")
    assert newest_version(tasks, "greet", engine_digest(adapted)) == (adapted, 3)


@pytest.mark.parametrize(
    ("published", "version", "older"),
    [
        (versions_of(2), 3, (1, 2)),
        (
            [None, replace(RECORD, regex="bad"), replace(RECORD, model="other"), *versions_of(1)],
            5,
            (1,),
        ),
        ([*versions_of(1), replace(RECORD, regex="bad")], 2, (1,)),
    ],
    ids=["two at once", "unusable ones before it", "an unusable one behind it"],
)
def test_newest_usable_version_is_served_and_older_usable_versions_are_known(
    published: list[TaskRecord | None], version: int, older: tuple[int, ...]
) -> None:
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker):
        tasks.records = [RECORD, *published]
        eventually(lambda: worker.record_version == version)
        looks = tasks.looks
        eventually(lambda: tasks.looks > looks + 3)
    assert worker.records.newest == (published[version - 2], version)
    assert worker.records.older == older


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"adapter": "new"}, "changes adapter"),
        ({"adapters": (("x", "new"),)}, "changes adapters"),
        ({"model": "m"}, "changes model"),
        ({"template": "{input}!"}, "changes template"),
        ({"draft": DraftSettings("tasc")}, "go back with `tasc task use greet 1`"),
    ],
)
def test_unusable_version_is_reported_once_and_the_next_version_is_used(
    changed: dict[str, Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watchers, "AGAIN_S", 0.01)
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker):
        tasks.records.append(replace(RECORD, **changed))
        looks = tasks.looks
        eventually(lambda: "version 1 stays in use" in caplog.text and tasks.looks > looks + 5)
        tasks.records += versions_of(1)
        eventually(lambda: worker.record_version == 3)
    (message,) = [m for m in caplog.messages if "version 1 stays in use" in m]
    assert named in message
    assert worker.records.older == (1,)


def test_change_that_fails_between_two_steps_is_logged_and_repeated(monkeypatch, caplog) -> None:
    monkeypatch.setattr(watchers, "AGAIN_S", 0.01)
    worker, tasks = Worker(), Tasks()
    worker.raising = [RuntimeError("no row could be drafted for")]
    with watching(tasks, worker):
        tasks.records += versions_of(1)
        eventually(lambda: worker.record_version == 2)
    assert "version 1 stays in use: no row could be drafted for" in caplog.text


def test_record_and_index_that_arrive_together_are_installed_in_sequence() -> None:
    worker, tasks = Worker(), Tasks()
    tasks.records += versions_of(1)
    worker.announced = SimpleNamespace(version=1)
    with watching(tasks, worker, Loop(0.02)):
        eventually(lambda: worker.artifact and worker.record_version == 2)
    assert (worker.made, worker.pending) == (2, 1)


def test_unreadable_record_delays_no_index() -> None:
    worker, tasks = Worker(), Tasks()
    tasks.records.append(None)
    worker.announced = SimpleNamespace(version=1)
    with watching(tasks, worker):
        eventually(lambda: worker.artifact and tasks.looks > 3)
