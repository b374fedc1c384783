"""`RecordUpdates` over a register in memory: what it deploys, what it says, and when it stops."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

import tiny
from support import eventually, record_of
from tasc_jobs.serve import RecordUpdates
from tasc_runtime.engine.versions import engine_digest
from tasc_store import StoreUnreachable, TaskRecord, UnknownTask

NAMES = ("a", "b")


class Register:
    """Tasks by name. One whose name is in ``faults`` cannot be read."""

    def __init__(self, record: TaskRecord) -> None:
        self.records = {name: [replace(record, name=name)] for name in NAMES}
        self.faults: dict[str, Exception] = {}

    def put(self, name: str, **changed: Any) -> str:
        """The digest of a new version."""
        record = replace(self.records[name][0], **changed)
        self.records[name].append(record)
        return engine_digest(record)

    def versions(self, name: str) -> list[int]:
        if name in self.faults:
            raise self.faults[name]
        return list(range(1, len(self.records[name]) + 1))

    def get(self, name: str, version: int) -> TaskRecord:
        return self.records[name][version - 1]


class Followed:
    """`RecordUpdates` of the register, and what they did."""

    def __init__(self, register: Register, **options: Any) -> None:
        self.deployed: list[Mapping[str, str]] = []
        self.said: list[str] = []
        options = {"update": self.deployed.append, "poll_s": 0.01, "again_s": 0.0, **options}
        self.updates = RecordUpdates(register, NAMES, say=self.said.append, **options)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.updates.look()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> TaskRecord:
    folder = tiny.make_folder(tmp_path_factory.mktemp("model"))
    return record_of(folder, "a", "{input} =>", max_tokens=8)


@pytest.fixture
def register(record: TaskRecord) -> Register:
    return Register(record)


@pytest.fixture
def followed(register: Register) -> Followed:
    return Followed(register)


def test_two_tasks_that_change_are_one_update(register: Register, followed: Followed) -> None:
    digests = {name: register.put(name, template="{input}:") for name in NAMES}
    followed.look(2)
    assert followed.deployed == [digests] == [followed.updates.digests]
    assert ["version 2 changes template" in line for line in followed.said] == [True, True]


@pytest.mark.parametrize(
    "fault", [None, UnknownTask("deleted"), StoreUnreachable("away"), OSError("unforeseen")]
)
def test_a_task_that_is_unreadable_or_refused_holds_no_other_up(
    register: Register, followed: Followed, fault: Exception | None
) -> None:
    before = followed.updates.digests
    if fault:
        register.faults["a"], named = fault, (str(fault),)
    else:
        register.put("a", model="/nowhere")
        named = ("version 2 cannot be used, version 1 stays in use", "`tasc task use a 1`")
    followed.look()
    changed = register.put("b", template="{input}:")
    followed.look(3)
    assert followed.deployed == [{**before, "b": changed}]
    assert [line.split(":")[0] for line in followed.said] == ["task a", "task b"]
    assert all(name in followed.said[0] for name in named)
    assert "version 2 changes template" in followed.said[1]


def test_a_task_made_anew_is_deployed_though_its_number_is_the_same(
    register: Register, followed: Followed
) -> None:
    register.records["a"] = [replace(register.records["a"][0], template="{input}:")]
    followed.look(2)
    assert len(followed.deployed) == 1
    assert followed.deployed[0]["a"] == engine_digest(register.records["a"][0])


def test_nothing_is_deployed_once_the_service_is_being_stopped(
    register: Register, followed: Followed
) -> None:
    checks, goes_on, found = threading.Event(), threading.Event(), register.get

    def get(name: str, version: int) -> TaskRecord:
        if version == 2:
            checks.set()
            goes_on.wait()
        return found(name, version)

    register.get = get  # type: ignore[method-assign]
    with followed.updates:
        register.put("b", template="{input}:")
        checks.wait()
    goes_on.set()
    followed.look()
    assert (followed.deployed, followed.said) == ([], [])


def test_the_stop_waits_for_an_update_that_has_begun(register: Register) -> None:
    begun, done = threading.Event(), []

    def update(digests: Mapping[str, str]) -> None:
        begun.set()
        threading.Event().wait(0.2)
        done.append(digests)

    with Followed(register, update=update).updates:
        register.put("b", template="{input}:")
        begun.wait()
    assert len(done) == 1


@pytest.mark.parametrize(
    ("status", "slow_s", "said"),
    [
        (ApplicationStatus.RUNNING, 300, ["is complete"]),
        (ApplicationStatus.DEPLOYING, 300, []),
        (ApplicationStatus.DEPLOYING, 0, ["is not complete", "out of memory", "task use b 1`"]),
        (ApplicationStatus.DEPLOY_FAILED, 300, ["failed", "out of memory", "task use b 1`"]),
    ],
)
def test_how_an_update_ends_is_said_once(
    register: Register, status: ApplicationStatus, slow_s: float, said: list[str]
) -> None:
    followed = Followed(register, rollout=lambda: (status, "out of memory"), slow_s=slow_s)
    register.put("b", template="{input}:")
    followed.look(4)
    assert len(followed.said) == 1 + bool(said)
    assert all(part in followed.said[-1] for part in said)


def test_an_update_that_fails_and_recovers_is_said_to_be_complete(register: Register) -> None:
    states = [ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.RUNNING]
    followed = Followed(register, rollout=lambda: (states.pop(0), "died"))
    register.put("b", template="{input}:")
    with followed.updates:
        eventually(lambda: len(followed.said) == 3)
    assert "failed: died" in followed.said[1]
    assert "is complete" in followed.said[2]
