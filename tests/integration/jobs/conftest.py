"""Fixtures of job tests in addition to the shared Redis and Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from batch_jobs import WorkerRun, batch_service, record_of
from openai import OpenAI

from tasc_jobs.demo.tasks import demo_record
from tasc_store import TaskRecord, TaskStore
from tiny import make_folder


@pytest.fixture
def task(name: str) -> str:
    return name


@pytest.fixture
def shipped_task(client: redis.Redis, task: str) -> TaskRecord:
    """A task with the shipped model, and no rows yet."""
    shipped = demo_record("massive_en")
    record = TaskRecord(task, shipped.model, shipped.fingerprint, shipped.template)
    TaskStore(client).put(record)
    return record


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers batches."""
    return make_folder(tmp_path_factory.mktemp("batch-model"))


@pytest.fixture
def served(client: redis.Redis, task: str, folder: Path) -> str:
    """The name of a task with that model."""
    TaskStore(client).put(record_of(task, folder))
    return task


@pytest.fixture
def run(client: redis.Redis, redis_url: str, served: str, tmp_path: Path) -> WorkerRun:
    (tmp_path / "work").mkdir()
    return WorkerRun(client, redis_url, served, tmp_path / "work")


@pytest.fixture
def openai(client: redis.Redis) -> Iterator[OpenAI]:
    """The official client of an HTTP service that keeps files and batches."""
    with batch_service(client) as found:
        yield found
