"""A real Redis server behind files and batches, emptied for each test."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from storage_service import StorageService

from support import free_port
from tasc_store import EmbeddedRedis, StoreClient, TaskRecord, TaskStore, connect


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with connect(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def make_service(client: redis.Redis, tmp_path: Path) -> Callable[..., StorageService]:
    """Makes services with the tasks ``greet`` and ``other``."""
    for name in ("greet", "other"):
        TaskStore(client).put(TaskRecord(name, "m", "f" * 32, "{input}"))
    return partial(StorageService, client, tmp_path / "files")


@pytest.fixture
def service(make_service) -> StorageService:
    return make_service()


@pytest.fixture
def down(tmp_path: Path) -> Iterator[StorageService]:
    """A service with a Redis that does not respond."""
    retry = Retry(NoBackoff(), 0)
    with StoreClient("127.0.0.1", free_port(), retry=retry) as client:
        yield StorageService(client, tmp_path / "files")
