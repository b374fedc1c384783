"""One real Redis and one real local Ray for all tests that need no server of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tasc_command import Command

from tasc_jobs.ray_local import local_ray
from tasc_store import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis.start() as server:
        yield server.url


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    with local_ray(num_cpus=4, object_store_mb=150):
        yield


@pytest.fixture
def tasc(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.wait_until_gone()
