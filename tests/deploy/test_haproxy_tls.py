"""The load balancer with a certificate: a self-signed one, made here."""

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from haproxy_process import balancing

from support import eventually


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


def test_answers_come_encrypted_and_only_so(secured, trusting):
    url = f"https://127.0.0.1:{secured.port}/v1/completions"
    assert httpx.post(url, verify=trusting).text in ("gateway0", "gateway1")
    with pytest.raises(httpx.TransportError):
        httpx.post(secured.url + "/v1/completions")


@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
def test_http_2_is_offered(secured, trusting, protocol):
    trusting.set_alpn_protocols([protocol])
    with (
        socket.create_connection(("127.0.0.1", secured.port)) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        assert encrypted.selected_alpn_protocol() == protocol


def test_a_client_that_does_not_trust_the_certificate_sends_nothing(secured, gateways):
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"https://127.0.0.1:{secured.port}/v1/completions")
    eventually(lambda: all(g.probes for g in gateways))
    assert [g.posts for g in gateways] == [[], []]
