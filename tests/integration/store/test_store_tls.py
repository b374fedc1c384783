"""Tests Redis behind TLS with a private certificate authority, as in managed services."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forwarder import Forwarder
from support import refused
from tasc_store import StoreUnreachable, TaskRecord, TaskStore, connect

pytestmark = pytest.mark.redis
KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
MADE = (
    f"req -x509 {KEY} -days 1 -subj /CN=authority -keyout ca.key -out ca.pem",
    f"req {KEY} -subj /CN=localhost -keyout tls.key -out tls.csr",
    "x509 -req -days 1 -in tls.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names"
    " -out tls.crt",
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.pem``, and ``tls.crt`` of 127.0.0.1 with its key, signed by it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH; it makes the certificates of this test")
    folder = tmp_path_factory.mktemp("tls")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for command in MADE:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def secured(certificates: Path, redis_url: str) -> Iterator[str]:
    """The URL of Redis behind a TLS proxy, because not every redis-server supports TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    forwarder = Forwarder(int(redis_url.rpartition(":")[2].removesuffix("/0")), context)
    yield forwarder.url
    forwarder.close()


def test_redis_url_can_name_a_private_certificate_authority(
    secured: str, certificates: Path
) -> None:
    record = TaskRecord("tls", "m", "f" * 32, "{input}")
    with connect(f"{secured}?ssl_ca_certs={certificates / 'ca.pem'}") as client:
        TaskStore(client).put(record)
        assert TaskStore(client).get("tls").model == "m"


def test_error_of_an_untrusted_certificate_names_the_setting(secured, certificates) -> None:
    with refused(StoreUnreachable, secured, "ssl_ca_certs"):
        connect(secured)
    with refused(StoreUnreachable, "ssl_ca_certs", "no-such.pem"):
        connect(f"{secured}?ssl_ca_certs={certificates / 'no-such.pem'}")
