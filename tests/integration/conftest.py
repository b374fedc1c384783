"""One real Redis and one real local Ray for all tests that need no server of their own."""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from tasc_command import Command, InProcess
from tasc_jobs.ray_local import local_ray
from tasc_serve.http.ray_proxy import environment
from tasc_serve.settings import HttpSettings
from tasc_store import EmbeddedRedis, connect


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis.start() as server:
        yield server.url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as connected:
        yield connected


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A separate Redis server that the test may damage."""
    with EmbeddedRedis.start() as running:
        yield running


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    with local_ray(
        num_cpus=4, object_store_mb=150, environment=partial(environment, HttpSettings())
    ):
        yield


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex}"


@pytest.fixture
def tasc(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.wait_until_gone()


@pytest.fixture
def in_process(tmp_path, monkeypatch, capsys) -> InProcess:
    """The command in this process.

    A store of its own is in this test's folder. Ray, where one runs, is the shared one.
    """
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("TASC_DATA_DIR", str(tmp_path / "redis"))
    return InProcess(monkeypatch, capsys)


@pytest.fixture
def tasc_here(in_process: InProcess, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """The command in this process, on the shared store."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    return in_process


@pytest.fixture
def run(in_process: InProcess) -> Callable[..., str]:
    """Runs the command in this process; returns its stdout, or its stderr if it fails."""
    return in_process.run
