import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_server import Prometheus, discovery_endpoint, started

from support import eventually
from tasc_store import EmbeddedRedis, connect

EXPORTER = Path(__file__).parent / "exporter.py"
TASKS = ("massive_en", "pos_ewt")


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped two fed processes often enough for rates."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on PATH; install it to run the dashboards' queries")
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedRedis.start())
        client = stack.enter_context(connect(store.url))
        for task in TASKS:
            stack.enter_context(exporter(store.url, task))
        url = stack.enter_context(discovery_endpoint(client))
        server = stack.enter_context(started(tmp_path_factory.mktemp("prometheus"), url))
        rated = 'rate(tasc_http_requests_total{code="200"}[5s]) > 0'
        eventually(lambda: len(server.query(rated)) == len(TASKS))
        yield server


def exporter(redis_url: str, task: str) -> subprocess.Popen[bytes]:
    """A fed process; leaving its context closes its standard input, which ends it."""
    return subprocess.Popen([sys.executable, str(EXPORTER), redis_url, task], stdin=subprocess.PIPE)
