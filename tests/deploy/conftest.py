from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateway_stub import Gateway
from haproxy_process import balancing, find_haproxy


@pytest.fixture(scope="session")
def haproxy() -> str:
    """The path of a real HAProxy."""
    found = find_haproxy()
    if found is None:
        pytest.skip("no haproxy on PATH nor in a wheel")
    return found


@pytest.fixture
def gateways() -> Iterator[tuple[Gateway, Gateway]]:
    with ExitStack() as stack:
        pair = (Gateway("gateway0"), Gateway("gateway1"))
        for gateway in pair:
            stack.callback(gateway.stop)
        yield pair


@pytest.fixture
def balancer(haproxy: str, gateways: tuple[Gateway, Gateway], tmp_path: Path) -> Iterator[str]:
    """URL of a real HAProxy that runs the shipped file with other ports."""
    with balancing(haproxy, gateways, tmp_path) as running:
        yield running.url
