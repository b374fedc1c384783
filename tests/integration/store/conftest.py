"""One real Redis server for all tests here, emptied for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from batch_requests import Shelf

from tasc_store import ArtifactStore, EmbeddedRedis, connect


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as running:
        yield running


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with connect(server.url) as connected:
        connected.flushall()
        yield connected
        connected.config_set("maxmemory", 0)


@pytest.fixture
def spare() -> Iterator[EmbeddedRedis]:
    """A server of the test's own, to be mistreated."""
    with EmbeddedRedis.start() as running:
        yield running


@pytest.fixture
def shelf(client: redis.Redis) -> Shelf:
    return Shelf(client)


@pytest.fixture
def store(client: redis.Redis) -> ArtifactStore:
    """Chunks of 10 bytes."""
    return ArtifactStore(client, "task", "finger", chunk_bytes=10)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of three chunks, the last of them short."""
    path = tmp_path / "source"
    path.write_bytes(bytes(range(25)))
    return path
