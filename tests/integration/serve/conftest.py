"""Fixtures of tests of workers and replicas in this process: a stored task, and its indexes."""

import uuid
from dataclasses import replace

import pytest
import redis
from serving import ALPHA, Task, make_task

from tasc_store import ArtifactStore, TaskStore


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A task of a tiny model that is in no store."""
    return make_task(tmp_path_factory.mktemp("model"), ALPHA)


@pytest.fixture
def task(client: redis.Redis, made: Task) -> Task:
    """The same model in the store under a name that only this test uses."""
    record = replace(made.record, name=f"own-{uuid.uuid4().hex}", corpus=None)
    TaskStore(client).put(record)
    return replace(made, record=record)


@pytest.fixture
def store(client: redis.Redis, task: Task) -> ArtifactStore:
    """The draft indexes of that task."""
    return ArtifactStore(client, task.record.name, task.record.fingerprint)
