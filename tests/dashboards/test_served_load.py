import math
from collections.abc import Iterator
from contextlib import closing

import pytest
from panel_queries import QUERIES
from prometheus_server import Prometheus, scraping
from served_load import ServedLoad

from metric_names import METRICS
from support import eventually

pytestmark = [pytest.mark.prometheus, pytest.mark.redis]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes two replicas and their gateway under load."""
    folder = tmp_path_factory.mktemp("served")
    own, asked = tmp_path_factory.mktemp("prometheus"), "tasc_http_requests_total > 0"
    with scraping(own, lambda redis, url: closing(ServedLoad(redis, url, folder))) as server:
        codes = {"200", "429", "503"}
        eventually(lambda: codes <= {series["code"] for series, _ in server.query(asked)})
        yield server


@pytest.mark.parametrize("name", QUERIES)
def test_a_panel_has_numbers_of_a_service_under_load(scraped: Prometheus, name: str):
    eventually(lambda: any(not math.isnan(value) for _, value in scraped.query(QUERIES[name])))


def test_a_service_under_load_exports_every_series(scraped: Prometheus):
    eventually(lambda: set(scraped.ask("label/__name__/values")) >= METRICS)


def test_drafting_pays_and_changes_no_answer(scraped: Prometheus):
    efficiency = QUERIES["drafting: Block efficiency, stat, A"]
    eventually(lambda: any(value > 1.1 for _, value in scraped.query(efficiency)))
    eventually(lambda: sum(v for _, v in scraped.query("tasc_lossless_checks_total")) > 0)
    wrong = scraped.query("tasc_lossless_mismatches_total")
    assert wrong
    assert sum(value for _, value in wrong) == 0
