import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from panel_queries import QUERIES
from prometheus_server import Prometheus, discovery_endpoint, started
from served_load import ServedLoad

from metric_names import METRICS
from support import eventually
from tasc_store import EmbeddedRedis, connect

pytestmark = [pytest.mark.prometheus, pytest.mark.redis]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes two replicas and their gateway while they are asked."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on PATH; install it to run the dashboards' queries")
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedRedis.start())
        client = stack.enter_context(connect(store.url))
        folder = tmp_path_factory.mktemp("served")
        load = stack.enter_context(closing(ServedLoad(client, store.url, folder)))
        url = stack.enter_context(discovery_endpoint(client))
        server = stack.enter_context(started(tmp_path_factory.mktemp("prometheus"), url))
        eventually(lambda: {200, 429, 503} <= load.codes)
        yield server


@pytest.mark.parametrize("name", QUERIES)
def test_a_panel_has_numbers_of_a_service_under_load(scraped: Prometheus, name: str):
    def shown() -> bool:
        return any(not math.isnan(value) for _, value in scraped.query(QUERIES[name]))

    eventually(shown)


def test_a_service_under_load_exports_every_series(scraped: Prometheus):
    def missing() -> set[str]:
        return METRICS - set(scraped.ask("label/__name__/values"))

    eventually(lambda: not missing())


def test_drafting_pays_and_changes_no_answer(scraped: Prometheus):
    efficiency = QUERIES["drafting: Block efficiency, stat, A"]
    eventually(lambda: any(value > 1.1 for _, value in scraped.query(efficiency)))
    eventually(lambda: sum(v for _, v in scraped.query("tasc_lossless_checks_total")) > 0)
    wrong = scraped.query("tasc_lossless_mismatches_total")
    assert wrong
    assert sum(value for _, value in wrong) == 0
