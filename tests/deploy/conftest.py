import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateway_stub import Gateway, accepts
from haproxy_process import balancing, find_haproxy

from support import eventually, free_port

SHIPPED = Path(__file__).parents[2] / "deploy" / "nginx.conf"
# Debian's nginx.conf includes files of conf.d in this way. Temporary files go to the test's folder.
MAIN = """
daemon off; master_process off; pid nginx.pid; error_log nginx.log;
events {}
http { access_log off; include tasc.conf; %s }
"""
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


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


@pytest.fixture(scope="session")
def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("no nginx on PATH")
    return found


@pytest.fixture
def nginx_ports() -> tuple[int, int]:
    """The ports for clients and for operators."""
    return free_port(), free_port()


@pytest.fixture
def nginx_command(
    nginx: str, gateways: tuple[Gateway, Gateway], nginx_ports: tuple[int, int], tmp_path: Path
) -> list[str]:
    """Returns a command that runs the shipped file with other addresses and no other change."""
    shipped = SHIPPED.read_text("utf-8")
    addresses = {f":800{i}": f":{gateway.port}" for i, gateway in enumerate(gateways)}
    clients, operators = nginx_ports
    addresses |= {"listen 8080": f"listen 127.0.0.1:{clients}", ":8081": f":{operators}"}
    for old, new in addresses.items():
        shipped, changed = re.subn(rf"{old}\b", new, shipped)
        assert changed == 1
    (tmp_path / "tasc.conf").write_text(shipped)
    folders = " ".join(f"{name}_temp_path {name};" for name in TEMPORARY)
    (tmp_path / "nginx.conf").write_text(MAIN % folders)
    return [nginx, "-p", str(tmp_path), "-c", "nginx.conf", "-e", str(tmp_path / "nginx.log")]


@pytest.fixture
def nginx_balancer(nginx_command: list[str], nginx_ports: tuple[int, int]) -> Iterator[str]:
    with subprocess.Popen(nginx_command) as process:
        try:
            eventually(lambda: accepts(nginx_ports[0]))
            yield f"http://127.0.0.1:{nginx_ports[0]}"
        finally:
            process.terminate()


@pytest.fixture(params=["balancer", "nginx_balancer"])
def any_balancer(request: pytest.FixtureRequest) -> str:
    """URL of a load balancer with one of the shipped files."""
    return request.getfixturevalue(request.param)
