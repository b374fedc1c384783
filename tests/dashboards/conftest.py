from collections.abc import Iterator

import pytest
from prometheus_server import Prometheus, scraping

from support import eventually

TASKS = ("massive_en", "pos_ewt")


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the exporters of two tasks often enough for rates."""
    with scraping(tmp_path_factory.mktemp("prometheus"), TASKS) as server:
        rated = 'rate(tasc_http_requests_total{code="200"}[5s]) > 0'
        eventually(lambda: len(server.query(rated)) == len(TASKS))
        yield server
