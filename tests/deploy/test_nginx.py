"""Tests the shipped nginx file in front of two gateways, with a real nginx on free ports."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_stub import Gateway, accepts
from haproxy_process import get, post, stream

from support import eventually, free_port

SHIPPED = Path(__file__).parents[2] / "deploy" / "nginx.conf"
# As Debian's own nginx.conf includes files of conf.d. Temporary files go to the test's folder.
MAIN = """
daemon off; master_process off; pid nginx.pid; error_log nginx.log;
events {}
http { access_log off; include tasc.conf; %s }
"""
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@pytest.fixture(scope="session")
def nginx() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        pytest.skip("no nginx on PATH")
    return found


@pytest.fixture
def ports() -> tuple[int, int]:
    """The ports for clients and for operators."""
    return free_port(), free_port()


@pytest.fixture
def command(
    nginx: str, gateways: tuple[Gateway, Gateway], ports: tuple[int, int], tmp_path: Path
) -> list[str]:
    """Returns a command that runs the shipped file with other addresses and no other change."""
    shipped = SHIPPED.read_text("utf-8")
    addresses = {f":800{i}": f":{gateway.port}" for i, gateway in enumerate(gateways)}
    addresses |= {"listen 8080": f"listen 127.0.0.1:{ports[0]}", ":8081": f":{ports[1]}"}
    for old, new in addresses.items():
        shipped, changed = re.subn(rf"{old}\b", new, shipped)
        assert changed == 1
    (tmp_path / "tasc.conf").write_text(shipped)
    folders = " ".join(f"{name}_temp_path {name};" for name in TEMPORARY)
    (tmp_path / "nginx.conf").write_text(MAIN % folders)
    return [nginx, "-p", str(tmp_path), "-c", "nginx.conf", "-e", str(tmp_path / "nginx.log")]


@pytest.fixture
def balancer(command: list[str], ports: tuple[int, int]) -> Iterator[str]:
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: accepts(ports[0]))
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            process.terminate()


def test_nginx_accepts_the_shipped_file_without_a_warning(command):
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr


def test_an_event_of_a_stream_does_not_wait_for_the_next(balancer, gateways):
    with stream("POST", balancer + "/v1/stream") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: first"
        for gateway in gateways:
            gateway.release.set()
        assert "data: last" in list(lines)


def test_requests_are_shared_and_none_is_lost_when_a_gateway_stops(balancer, gateways):
    answers = [post(balancer + "/v1/completions") for _ in range(8)]
    assert {a.text for a in answers} == {"gateway0", "gateway1"}
    gateways[0].stop()
    answers = [post(balancer + "/v1/completions") for _ in range(8)]
    assert {(a.status_code, a.text) for a in answers} == {(200, "gateway1")}


def test_what_reached_a_gateway_which_died_is_not_sent_again(balancer, gateways):
    for gateway in gateways:
        gateway.dies = True
    died = post(balancer + "/v1/completions")
    assert (died.status_code, died.json()["error"]["type"]) == (502, "server_error")
    assert sum(len(g.posts) for g in gateways) == 1


def test_paths_of_operators_and_large_bodies_are_refused_in_openais_shape(balancer, ports):
    for path in ("/v1/tasks", "/sd", "/metrics", "/-/healthz"):
        refused = get(balancer + path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, None)
        assert get(f"http://127.0.0.1:{ports[1]}{path}").text in ("gateway0", "gateway1")
    large = post(balancer + "/v1/completions", content=bytes(5 << 20))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    assert post(balancer + "/v1/files", content=bytes(5 << 20)).status_code == 200


def test_a_request_keeps_its_id_or_is_given_one(balancer, gateways):
    post(balancer + "/v1/completions", headers={"X-Request-ID": "mine-1"})
    post(balancer + "/v1/completions")
    ids = [id for gateway in gateways for id in gateway.posts]
    assert "mine-1" in ids
    assert all(ids)
