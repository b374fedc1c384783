"""The shipped HAProxy file in front of two gateways: balancing, retries, drain and TLS."""

import os
import shutil
import socket
import ssl
import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from gateway_stub import CONFIG
from haproxy_process import balancing, post, stream

from support import eventually


def answered(balancer: str, path: str = "/v1/completions", times: int = 8) -> list[str]:
    answers = [post(balancer + path) for _ in range(times)]
    assert {a.status_code for a in answers} == {200}
    return [a.text for a in answers]


@pytest.mark.parametrize("variable", ["TASC_CLIENTS=:8080", "TASC_GATEWAYS=localhost:8000"])
def test_haproxy_accepts_the_shipped_file_without_a_warning(haproxy, variable):
    command, env = [haproxy, "-c", "-f", str(CONFIG)], os.environ | dict([variable.split("=")])
    checked = subprocess.run(command, env=env, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr + checked.stdout


def test_requests_are_balanced_between_the_gateways(balancer):
    answers = answered(balancer)
    assert {answers.count(name) for name in ("gateway0", "gateway1")} == {4}


def test_busy_gateway_gets_no_requests_while_another_gateway_is_idle(balancer, gateways):
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(answered, balancer, "/v1/slow", 1)
        eventually(lambda: any(g.posts for g in gateways))
        busy, idle = sorted(gateways, key=lambda g: len(g.posts), reverse=True)
        assert answered(balancer) == [idle.name] * 8
        busy.release.set()
        assert slow.result() == [busy.name]


def test_no_request_is_lost_when_a_gateway_stops(any_balancer, gateways):
    assert set(answered(any_balancer)) == {"gateway0", "gateway1"}
    gateways[0].stop()
    assert answered(any_balancer) == ["gateway1"] * 8


def test_request_to_a_dying_gateway_is_not_repeated(any_balancer, gateways):
    """HAProxy repeats completions with an idempotency key, but neither files nor batches."""
    for gateway in gateways:
        gateway.dies = True
    keyed = {"Idempotency-Key": "k"}
    for path, headers in (("completions", {}), ("batches", keyed), ("files", keyed)):
        died = post(f"{any_balancer}/v1/{path}", headers=headers)
        assert (died.status_code, died.json()["error"]["type"]) == (502, "server_error")
    assert sum(len(g.posts) for g in gateways) == 3


def test_request_with_an_idempotency_key_is_repeated(balancer, gateways):
    gateways[0].dies = True
    url, keyed = balancer + "/v1/completions", {"Idempotency-Key": "k"}
    answers = [post(url, headers=keyed, json={"prompt": "p"}) for _ in range(4)]
    assert [a.text for a in answers] == ["gateway1"] * 4
    assert gateways[0].posts


def test_draining_gateway_finishes_its_requests_and_gets_no_new_requests(balancer, gateways):
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(answered, balancer, "/v1/slow", 1)
        eventually(lambda: any(g.posts for g in gateways))
        draining, other = sorted(gateways, key=lambda g: len(g.posts), reverse=True)
        draining.ready = False
        probes = draining.probes
        eventually(lambda: draining.probes >= probes + 5)
        # If it were still used, its one open request would soon be the minimum.
        later = [pool.submit(answered, balancer, "/v1/slow", 1) for _ in range(3)]
        eventually(lambda: len(other.posts) == 3)
        draining.release.set()
        assert first.result() == [draining.name]
        other.release.set()
        assert [request.result() for request in later] == [[other.name]] * 3


def test_response_is_503_if_no_gateway_is_ready(balancer, gateways):
    for gateway in gateways:
        gateway.ready = False
    posted = partial(post, balancer + "/v1/completions")
    eventually(lambda: posted().status_code == 503)
    assert posted().headers["Retry-After"] == "2"
    assert posted().json()["error"]["code"] == "service_unavailable"


def test_request_keeps_its_id_or_gets_an_id(any_balancer, gateways):
    for headers in ({"X-Request-ID": "mine-1"}, {}):
        post(any_balancer + "/v1/completions", headers=headers)
    kept, made = sorted((i for g in gateways for i in g.posts), key=lambda i: i != "mine-1")
    assert kept == "mine-1"
    assert made


def test_haproxy_returns_and_logs_request_ids(balancer, tmp_path: Path):
    made = post(balancer + "/v1/completions").headers["X-Request-ID"]
    assert uuid.UUID(made)
    eventually(lambda: f"id={made}" in (tmp_path / "haproxy.log").read_text())


def test_streamed_event_is_sent_before_the_next_event(any_balancer, gateways):
    with stream("POST", any_balancer + "/v1/stream") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: first"
        for gateway in gateways:
            gateway.release.set()
        assert "data: last" in list(lines)


def test_haproxy_finds_gateways_by_one_dns_name(haproxy, gateways, tmp_path: Path):
    address = f"localhost:{gateways[0].port}"
    with balancing(haproxy, gateways[:1], tmp_path, TASC_GATEWAYS=address) as running:
        assert answered(running.url) == ["gateway0"] * 8


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tls.crt`` with ``tls.key`` beside it, as a Kubernetes secret is mounted."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH; it makes the certificate of this test")
    folder = tmp_path_factory.mktemp("tls")
    made = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout tls.key -out tls.crt"
    )
    subprocess.run(made.split(), cwd=folder, check=True, capture_output=True)
    return folder / "tls.crt"


@pytest.fixture
def secured(haproxy, gateways, certificate, tmp_path: Path):
    with balancing(haproxy, gateways, tmp_path, TASC_CERTIFICATE=str(certificate)) as running:
        yield running


@pytest.fixture
def trusting(certificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def test_balancer_with_a_certificate_refuses_plain_http(secured, trusting):
    url = f"https://127.0.0.1:{secured.port}/v1/completions"
    assert post(url, verify=trusting).text in ("gateway0", "gateway1")
    with pytest.raises(httpx.TransportError):
        post(secured.url + "/v1/completions")


@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
def test_http_2_and_http_1_are_offered(secured, trusting, protocol):
    trusting.set_alpn_protocols([protocol])
    with (
        socket.create_connection(("127.0.0.1", secured.port)) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        assert encrypted.selected_alpn_protocol() == protocol


def test_request_is_not_sent_if_the_certificate_is_untrusted(secured, gateways):
    with pytest.raises(httpx.ConnectError):
        post(f"https://127.0.0.1:{secured.port}/v1/completions")
    eventually(lambda: all(g.probes for g in gateways))
    assert [g.posts for g in gateways] == [[], []]
