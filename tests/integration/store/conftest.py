"""One real Redis server for all tests here, emptied for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from batch_requests import Shelf

from tasc_store import ArtifactStore, EmbeddedRedis


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis.start() as server:
        yield server.url


@pytest.fixture
def client(client: redis.Redis) -> Iterator[redis.Redis]:
    client.flushall()
    yield client
    client.config_set("maxmemory", 0)


@pytest.fixture
def shelf(client: redis.Redis, tmp_path: Path) -> Shelf:
    return Shelf(client, tmp_path / "files")


@pytest.fixture
def store(client: redis.Redis) -> ArtifactStore:
    """A store with chunks of 10 bytes."""
    return ArtifactStore(client, "task", "finger", chunk_bytes=10)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of three chunks, the last of them short."""
    path = tmp_path / "source"
    path.write_bytes(bytes(range(25)))
    return path
