"""A real Prometheus with the shipped configuration, and its endpoint for discovering targets."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from support import eventually, free_port, http_server
from tasc_serve.metrics.discovery import live_targets, service_discovery
from tasc_store import EmbeddedRedis, connect

EXPORTER = Path(__file__).parent / "exporter.py"
DEPLOY = Path(__file__).parents[2] / "deploy"


@contextmanager
def discovery_endpoint(client: redis.Redis) -> Iterator[str]:
    """Serves ``/sd`` with the targets in Redis; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(service_discovery(live_targets(client))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Handler) as url:
        yield f"{url}/sd"


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        found = self.ask("query", query=expr)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def scraping(folder: Path, tasks: Sequence[str]) -> Iterator[Prometheus]:
    """Runs Prometheus on the shipped files; it scrapes an exporter for each task."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on PATH; install it to run the dashboards' queries")
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedRedis.start())
        client = stack.enter_context(connect(store.url))
        for task in tasks:  # leaving its context closes its standard input, which ends it
            command = [sys.executable, str(EXPORTER), store.url, task]
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
        url = stack.enter_context(discovery_endpoint(client))
        yield stack.enter_context(started(folder, url))


@contextmanager
def started(folder: Path, discovery_url: str) -> Iterator[Prometheus]:
    """Runs Prometheus on the shipped files, with discovery each second instead of each five."""
    text = (DEPLOY / "prometheus.yml").read_text("utf-8")
    shipped = "http://127.0.0.1:8081/sd"
    assert text.count(shipped) == 1
    text = text.replace(shipped, discovery_url).replace(": 5s", ": 1s")
    (folder / "prometheus.yml").write_text(text, "utf-8")
    shutil.copy(DEPLOY / "rules.yml", folder)
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    with process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            eventually(server.ready)
            yield server
        finally:
            process.terminate()
