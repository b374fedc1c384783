import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis
from prometheus_server import Prometheus, scraping

from support import eventually

EXPORTER = Path(__file__).parent / "exporter.py"
TASKS = ("massive_en", "pos_ewt")


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped two fed processes often enough for rates."""
    feeds = [partial(exporter, task) for task in TASKS]
    with scraping(tmp_path_factory.mktemp("prometheus"), *feeds) as server:
        rated = 'rate(tasc_http_requests_total{code="200"}[5s]) > 0'
        eventually(lambda: len(server.query(rated)) == len(TASKS))
        yield server


def exporter(task: str, client: redis.Redis, url: str) -> subprocess.Popen[bytes]:
    """A fed process; leaving its context closes its standard input, which ends it."""
    return subprocess.Popen([sys.executable, str(EXPORTER), url, task], stdin=subprocess.PIPE)
