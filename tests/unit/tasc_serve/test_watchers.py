"""Watchers of records, indexes and the queue: what they take in, say, and try again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from support import eventually
from tasc_draft import DraftSettings
from tasc_engine.errors import GuideError
from tasc_runtime.engine.versions import MOST_KNOWN, Records
from tasc_runtime.errors import AdapterRefused, StaleProposer
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.monitor.store_health import QueueWatch
from tasc_serve.replica import record_watcher
from tasc_serve.replica.record_watcher import RecordWatcher
from tasc_store import StoreUnreachable, TaskRecord
from tasc_store.batches.leases import Waiting

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
        self.records, self.record = Records(RECORD, 1), RECORD
        self.needed: set[int] = set()
        self.engine = SimpleNamespace(
            longest=9, guides=SimpleNamespace(of=self._guide), answers_by=self.needed.__contains__
        )
        self.proposer, self.target_number = SimpleNamespace(index=None), 0
        self.loaded: list[str | None] = []
        self.raising: list[Exception] = []

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

    def require_adapters(self, record: TaskRecord) -> None:
        if record.adapter == "no files":
            raise AdapterRefused("adapter no files: there are none")

    def take(self, record: TaskRecord, version: int, target: str | None, proposer: None) -> None:
        if self.raising:
            raise self.raising.pop()
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
    """As the real one, it lets nothing out that an action raises."""

    def between_steps(self, action: Callable[[], None]) -> None:
        with suppress(Exception):
            action()


@contextmanager
def watching(tasks: Tasks, worker: Worker, keep_s: float = 60.0) -> Iterator[RecordWatcher]:
    watcher = RecordWatcher(worker, Loop(), tasks, 0.005, keep_s)
    try:
        yield watcher
    finally:
        watcher.close()


def watched(
    published: list[TaskRecord | None], done: Callable[[Worker], bool], keep_s: float = 60.0
) -> Worker:
    """A worker that served version 1 when all of these were published in one moment."""
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker, keep_s):
        tasks.records = [RECORD, *published]
        eventually(lambda: done(worker))
    return worker


def adapted(*names: str) -> list[TaskRecord | None]:
    return [replace(RECORD, adapter=name) for name in names]


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
    caplog.set_level("INFO")
    worker, tasks = Worker(), Tasks()
    watcher = RecordWatcher(worker, Loop(), tasks, 0.005, 60.0)
    tasks.records.append(replace(RECORD, **broken))
    for published, told in ((None, "version 2"), (replace(RECORD, adapter="good"), "version 3")):
        tasks.records += [published] if published else []
        eventually(lambda told=told: told in caplog.text)
    watcher.close()
    (said,) = [r.getMessage() for r in caplog.records if "version 1 stays in use" in r.getMessage()]
    assert "go back with `tasc task use greet 1`" in said
    assert worker.loaded[-1] == "good"
    assert worker.records.older == (1,)


def test_a_change_that_fails_between_two_steps_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record_watcher, "AGAIN_S", 0.01)
    worker, tasks = Worker(), Tasks()
    worker.raising = [RuntimeError("no row could be drafted for")]
    with watching(tasks, worker):
        tasks.records += told(1)
        eventually(lambda: worker.record_version == 2)
    assert "version 1 stays in use: no row could be drafted for" in caplog.text


def test_a_proposer_that_came_too_late_is_made_again_and_nothing_else() -> None:
    worker, tasks = Worker(), Tasks()
    worker.raising = [StaleProposer("the index has changed")] * 2
    with watching(tasks, worker):
        tasks.records += adapted("new")
        eventually(lambda: worker.record_version == 2)
    assert worker.loaded == ["new"]


def test_what_takes_a_moment_is_looked_at_before_a_model_is_loaded() -> None:
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker) as watcher:
        for version, wrong in enumerate(({"draft": DraftSettings("tasc")}, {}), 2):
            tasks.records.append(replace(RECORD, **{"adapter": "no files", **wrong}))
            eventually(lambda version=version: watcher._failed == version)
    assert worker.loaded == []


def test_a_third_versions_adapters_come_once_nobody_here_needs_the_first_ones() -> None:
    worker, tasks = Worker(), Tasks()
    worker.needed.add(0)
    with watching(tasks, worker):
        tasks.records += adapted("second")
        eventually(lambda: worker.record_version == 2)
        tasks.records += adapted("third")
        looks = tasks.looks
        eventually(lambda: tasks.looks > looks + 3)
        assert (worker.loaded, worker.records.older) == (["second"], (1,))
        worker.needed.clear()
        eventually(lambda: worker.record_version == 3)
    assert worker.loaded == ["second", "third"]
    assert worker.records.older == (2,)


def test_a_third_version_without_files_has_nothing_freed() -> None:
    worker, tasks = Worker(), Tasks()
    with watching(tasks, worker) as watcher:
        tasks.records += adapted("second")
        eventually(lambda: worker.record_version == 2)
        tasks.records += adapted("no files")
        eventually(lambda: watcher._failed == 3)
    assert (worker.loaded, worker.records.older) == (["second"], (1,))


def test_what_cannot_be_loaded_is_tried_ever_more_rarely_and_anew_with_another_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_watcher, "AGAIN_S", 0.01)
    monkeypatch.setattr(record_watcher, "_MOST_AGAIN_S", 0.04)
    worker, tasks = Worker(), Tasks()
    waits: list[float] = []

    def load(record: TaskRecord) -> None:
        waits.append(watcher._wait_s)
        raise AdapterRefused("broken")

    worker.target_for = load
    with watching(tasks, worker) as watcher:
        tasks.records += adapted("broken")
        eventually(lambda: len(waits) > 4)
        tasks.records += adapted("also broken")
        eventually(lambda: watcher._failed == 3)
    assert waits[1:5] == [0.02, 0.04, 0.04, 0.04]


class Queue:
    """Says what the script has, the last of it for ever; what is shown whenever it is asked."""

    def __init__(
        self, registry: CollectorRegistry, *said: Mapping[str, Waiting] | Exception
    ) -> None:
        self.registry, self.said = registry, list(said)
        self.shown: list[tuple[float | None, float | None]] = []

    def waiting(self) -> Mapping[str, Waiting]:
        self.shown.append(shown(self.registry, "tag"))
        said: Any = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return dict(said)


def shown(registry: CollectorRegistry, task: str) -> tuple[float | None, float | None]:
    names = ("tasc_batch_waiting", "tasc_batch_oldest_waiting_seconds")
    found = [registry.get_sample_value(name, {"task": task}) for name in names]
    return found[0], found[1]


def test_tasks_of_ones_own_are_there_at_0_and_others_from_when_a_batch_waits() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, ["tag"])
    assert (shown(registry, "tag"), shown(registry, "other")) == ((0, 0), (None, None))
    metrics.set_batches({"other": Waiting(2, 30.0)})
    assert (shown(registry, "tag"), shown(registry, "other")) == ((0, 0), (2, 30))
    metrics.set_batches({"tag": Waiting(1, 5.0)})
    assert (shown(registry, "tag"), shown(registry, "other")) == ((1, 5), (0, 0))


def test_a_store_that_is_away_changes_nothing_and_is_asked_again() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, ["tag"])
    away = StoreUnreachable("away")
    three, four = {"tag": Waiting(3, 7.0)}, {"tag": Waiting(4, 9.0)}
    queue = Queue(registry, three, away, ValueError("odd"), four)
    watch = QueueWatch(queue, metrics, 0.01)
    try:
        eventually(lambda: shown(registry, "tag") == (4, 9))
        assert queue.shown[:4] == [(0, 0), (3, 7), (3, 7), (3, 7)]
    finally:
        watch.close()
