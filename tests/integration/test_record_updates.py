"""Tests the deployments, messages and end of `RecordUpdates`; they need only Redis."""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from ray.serve.schema import ApplicationStatus

import tiny
from lora_folders import WEIGHTS, cut, make_adapter
from support import eventually, record_of
from tasc_jobs.serve import RecordUpdates
from tasc_runtime.engine.versions import engine_digest
from tasc_store import StoreUnreachable, TaskRecord, TaskStore, UnknownTask

pytestmark = pytest.mark.redis


class Followed:
    """`RecordUpdates` of two tasks of a model, and the record of their actions."""

    def __init__(self, client: redis.Redis, record: TaskRecord, **options: Any) -> None:
        self.store = TaskStore(client)
        self.a, self.b = names = f"{record.name}.a", f"{record.name}.b"
        self.record = record
        for name in names:
            self.put(name)
        self.deployed: list[Mapping[str, str]] = []
        self.messages: list[str] = []
        options = {"update": self.deployed.append, "poll_s": 0.01, "again_s": 0.0, **options}
        self.updates = RecordUpdates(self.store, names, say=self.messages.append, **options)

    def put(self, name: str, **changed: Any) -> str:
        """Stores a new version and returns its digest."""
        record = replace(self.record, name=name, **changed)
        self.store.put(record)
        return engine_digest(record)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.updates.poll()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(folder, tmp_path_factory.mktemp("lora"))


@pytest.fixture
def follow(client: redis.Redis, folder: Path, name: str) -> Callable[..., Followed]:
    return partial(Followed, client, record_of(folder, name, "{input} =>", max_tokens=8))


@pytest.fixture
def followed(follow: Callable[..., Followed]) -> Followed:
    return follow()


def test_only_changes_that_need_other_replicas_redeploy_the_service(followed, adapter) -> None:
    first = followed.updates.digests
    followed.put(followed.a, max_tokens=7)
    followed.look()
    assert followed.deployed == []
    followed.put(followed.a, max_tokens=7, adapter=str(adapter))
    followed.look(2)
    (second,) = followed.deployed
    assert second == followed.updates.digests != first
    (message,) = followed.messages
    assert f"{followed.a}: version 3 changes adapter;" in message
    followed.put(followed.a)
    followed.look()
    assert followed.deployed == [second, first]


def test_changes_of_two_tasks_cause_one_update(followed: Followed) -> None:
    digests = {name: followed.put(name, template="{input}:") for name in (followed.a, followed.b)}
    followed.look(2)
    assert followed.deployed == [digests] == [followed.updates.digests]
    assert ["version 2 changes template" in line for line in followed.messages] == [True, True]


@pytest.mark.parametrize("named", [False, True], ids=["adapter", "adapters"])
@pytest.mark.parametrize(
    "breaks",
    [shutil.rmtree, cut, lambda folder: (folder / WEIGHTS).unlink()],
    ids=["missing", "another shape", "no safetensors"],
)
def test_broken_adapter_is_deployed_only_after_its_repair(
    followed: Followed, adapter: Path, breaks: Callable[[Path], object], named: bool, tmp_path: Path
) -> None:
    place = shutil.copytree(adapter, tmp_path / "next")
    breaks(place)
    given = {"adapters": (("x", str(place)),)} if named else {"adapter": str(place)}
    followed.put(followed.a, **given)
    followed.look(3)
    (message,) = followed.messages
    assert "version 2 cannot be used, version 1 stays in use" in message
    assert str(place) in message
    assert f"`tasc task use {followed.a} 1`" in message
    assert followed.deployed == []
    shutil.copytree(adapter, place, dirs_exist_ok=True)
    followed.look()
    assert len(followed.deployed) == 1


@pytest.mark.parametrize(
    "fault", [None, UnknownTask("deleted"), StoreUnreachable("away"), OSError("unforeseen")]
)
def test_unreadable_or_refused_task_delays_no_update_of_another_task(
    followed, fault, monkeypatch
) -> None:
    before, versions = followed.updates.digests, followed.store.versions

    def fails(name: str) -> list[int]:
        if name == followed.a:
            raise fault
        return versions(name)

    if fault:
        monkeypatch.setattr(followed.store, "versions", fails)
    else:
        followed.put(followed.a, model="/nowhere")
    followed.look()
    changed = followed.put(followed.b, template="{input}:")
    followed.look(3)
    assert followed.deployed == [{**before, followed.b: changed}]
    refused, updated = followed.messages
    assert refused.startswith(f"task {followed.a}: ")
    assert (str(fault) if fault else "version 2 cannot be used, version 1 stays in use") in refused
    assert (f"`tasc task use {followed.a} 1`" in refused) == (fault is None)
    assert updated.startswith(f"task {followed.b}: version 2 changes template")


def test_recreated_task_is_deployed_although_its_version_is_equal(followed: Followed) -> None:
    followed.store.delete(followed.a)
    anew = followed.put(followed.a, template="{input}:")
    followed.look(2)
    assert [digests[followed.a] for digests in followed.deployed] == [anew]


def test_stopping_service_deploys_nothing(followed, monkeypatch) -> None:
    checks, goes_on, found = threading.Event(), threading.Event(), followed.store.get

    def get(name: str, version: int) -> TaskRecord:
        if version == 2:
            checks.set()
            goes_on.wait()
        return found(name, version)

    monkeypatch.setattr(followed.store, "get", get)
    with followed.updates:
        followed.put(followed.b, template="{input}:")
        checks.wait()
    goes_on.set()
    followed.look()
    assert (followed.deployed, followed.messages) == ([], [])


def test_stop_waits_for_a_running_update(follow: Callable[..., Followed]) -> None:
    begun, done = threading.Event(), []

    def update(digests: Mapping[str, str]) -> None:
        begun.set()
        threading.Event().wait(0.2)
        done.append(digests)

    followed = follow(update=update)
    with followed.updates:
        followed.put(followed.b, template="{input}:")
        begun.wait()
    assert len(done) == 1


RUNNING, DEPLOYING = ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING
FAILED = ApplicationStatus.DEPLOY_FAILED


@pytest.mark.parametrize(
    ("states", "slow_s", "messages"),
    [
        ([RUNNING], 300, ["is complete"]),
        ([DEPLOYING], 300, []),
        ([DEPLOYING], 0, ["is not complete"]),
        ([FAILED], 300, ["failed"]),
        ([FAILED, FAILED, RUNNING], 300, ["failed", "is complete"]),
    ],
)
def test_end_of_an_update_is_reported_once(follow, states, slow_s, messages) -> None:
    following = iter(states + states[-1:] * 5)
    followed = follow(rollout=lambda: (next(following), "out of memory"), slow_s=slow_s)
    followed.put(followed.b, template="{input}:")
    followed.look(5)
    assert len(followed.messages) == 1 + len(messages)
    for part, message in zip(messages, followed.messages[1:], strict=True):
        assert part in message
        if part != "is complete":
            assert "out of memory" in message
            assert "b 1`" in message


def test_failed_update_is_reported_once_and_repeated(follow) -> None:
    tries = []

    def update(digests: Mapping[str, str]) -> None:
        tries.append(digests)
        if len(tries) < 3:
            raise ConnectionError("no controller")

    followed = follow(update=update)
    with followed.updates:
        followed.put(followed.a, template="{input}:")
        eventually(lambda: len(followed.messages) == 2)
    assert len(tries) == 3
    assert "no controller" in followed.messages[0]
    assert "version 2 changes template" in followed.messages[1]
