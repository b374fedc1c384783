"""What job tests need beside the shared Redis and Ray."""

import uuid

import pytest

from tasc_store import connect


@pytest.fixture
def client(redis_url):
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def task():
    """A name no other test uses."""
    return f"t-{uuid.uuid4().hex}"
