"""A real Redis and a real local Ray, one of each for all tests of this folder."""

import uuid

import pytest

from tasc_jobs.ray_local import local_ray
from tasc_store import EmbeddedRedis, connect


@pytest.fixture(scope="session")
def redis_url():
    with EmbeddedRedis.start() as server:
        yield server.url


@pytest.fixture
def client(redis_url):
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def task():
    """A name no other test uses."""
    return f"t-{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def ray_cluster():
    with local_ray(num_cpus=4, object_store_mb=150):
        yield
