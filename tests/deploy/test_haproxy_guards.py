"""Tests the requests that the load balancer does not pass to the gateways."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from haproxy_process import Balancer, balancing, get, post

from support import DEADLINE_S, eventually
from tasc_serve.settings import LimitSettings

OPERATORS_ONLY = ["/sd", "/metrics", "/v1/tasks", "/-/routes", "/openapi.json"]


@pytest.fixture
def guarded(haproxy, gateways, tmp_path: Path) -> Iterator[Balancer]:
    """A balancer with low limits on requests and connections."""
    few = {"TASC_KEY_REQUESTS": "3", "TASC_ADDRESS_REQUESTS": "5", "TASC_ADDRESS_CONNECTIONS": "4"}
    few |= {"TASC_ADDRESS_KEYED_REQUESTS": "9"}
    with balancing(haproxy, gateways, tmp_path, **few) as running:
        yield running


def codes(url: str, times: int, key: str | None = None) -> list[int]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return [post(url, headers=headers).status_code for _ in range(times)]


def test_clients_reach_the_api_but_no_operator_paths(balancer, gateways):
    for path in (*OPERATORS_ONLY, "/v1/%74asks", "/v1/tasks/", "/", "/nothing"):
        answer = get(balancer + path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, None), path
    assert [g.gets for g in gateways] == [[], []]
    for path in ("/v1/models", "/v1/batches/b1", "/healthz", "/readyz"):
        assert get(balancer + path).status_code == 200, path


def test_operators_reach_all_paths_at_their_own_address(guarded):
    for path in OPERATORS_ONLY:
        assert get(guarded.operators + path).status_code == 200, path


def test_key_over_its_limit_gets_429_and_other_keys_are_served(guarded):
    url = guarded.url + "/v1/completions"
    assert codes(url, 4, "greedy") == [200, 200, 200, 429]
    refused = post(url, headers={"Authorization": "Bearer greedy"})
    assert refused.headers["Retry-After"] == "10"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert codes(url, 3, "modest") == [200, 200, 200]


def test_requests_without_a_key_are_counted_by_address(guarded):
    assert codes(guarded.url + "/v1/completions", 6) == [200] * 5 + [429]
    assert codes(guarded.url + "/v1/completions", 1, "modest") == [200]


def test_requests_with_many_keys_are_counted_by_address(guarded):
    url = guarded.url + "/v1/completions"
    found = [code for i in range(10) for code in codes(url, 1, f"made-up-{i}")]
    assert found == [200] * 9 + [429]
    assert codes(url, 5) == [200] * 5


def test_too_large_body_does_not_reach_a_gateway(balancer, gateways):
    limit = LimitSettings().max_body_bytes
    url = balancer + "/v1/completions"
    assert post(url, content=b" " * limit).status_code == 200
    assert post(url, content=b" " * (limit + 1)).status_code == 413
    assert sum(len(g.posts) for g in gateways) == 1


def test_uploaded_file_has_a_separate_size_limit(balancer):
    limits, url = LimitSettings(), balancer + "/v1/files"
    assert post(url, content=b" " * (limits.max_body_bytes + 1)).status_code == 200
    headers = {"Content-Length": str(limits.max_file_bytes + 2**20 + 1)}
    assert refused_early(balancer, "/v1/files", headers).startswith(b"HTTP/1.1 413 ")


def refused_early(balancer: str, path: str, headers: dict[str, str]) -> bytes:
    """Returns the first line of the response to a request with an unfinished body."""
    host, port = balancer.removeprefix("http://").split(":")
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode() + b" " * 20_000)
        client.settimeout(DEADLINE_S)
        return client.recv(64)


@pytest.mark.parametrize(
    "headers",
    [{f"X-{i}": "1" for i in range(70)}, {"X-Long": "x" * 16_000}],
    ids=["too many", "too long"],
)
def test_headers_over_the_limit_are_refused(balancer, gateways, headers):
    assert get(balancer + "/v1/models", headers=headers).status_code == 400
    assert [g.gets for g in gateways] == [[], []]


def test_connections_per_address_are_limited(guarded):
    hoard = [socket.create_connection(("127.0.0.1", guarded.port)) for _ in range(4)]
    try:
        with pytest.raises(httpx.TransportError):
            get(guarded.url + "/v1/models")
    finally:
        for connection in hoard:
            connection.close()
    eventually(lambda: _gets(guarded.url + "/v1/models"))


def _gets(url: str) -> bool:
    try:
        return get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_slow_body_does_not_occupy_a_gateway(haproxy, gateways, tmp_path: Path):
    with (
        balancing(haproxy, gateways, tmp_path, TASC_SEND_TIMEOUT="1s") as running,
        socket.create_connection(("127.0.0.1", running.port)) as slow,
    ):
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf")
        assert post(running.url + "/v1/completions").status_code == 200
        assert sum(len(g.posts) for g in gateways) == 1
        slow.settimeout(DEADLINE_S)
        assert slow.recv(64).startswith(b"HTTP/1.1 408 ")
