import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import httpx
import pytest
import redis
from prometheus_client import CollectorRegistry, Counter

from support import eventually, refused
from tasc_runtime.errors import SettingsError
from tasc_serve.metrics.discovery import MetricsPort, live_targets
from tasc_store import EmbeddedRedis, StoreUnreachable, connect

pytestmark = pytest.mark.redis
HOST = "127.0.0.1"

ONE_PORT = """
import sys, time
from prometheus_client import CollectorRegistry
from tasc_serve.metrics.discovery import MetricsPort
from tasc_store import connect
with MetricsPort(connect(sys.argv[1]), CollectorRegistry(), host="127.0.0.1", ttl_s=1):
    print("listed", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        yield client


def registry_with(name: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter(name, "Counted.", registry=registry).inc(7)
    return registry


def test_each_metrics_port_is_listed_until_it_closes(client):
    with MetricsPort(client, registry_with("one"), host=HOST, ttl_s=10) as one:
        with MetricsPort(client, registry_with("two"), host=HOST, ttl_s=10) as two:
            assert live_targets(client) == sorted([one.target, two.target])
            texts = [httpx.get(f"http://{p.target}/metrics").text for p in (one, two)]
            assert "one_total 7.0" in texts[0]
            assert "two_total 7.0" in texts[1]
            assert "_created" not in texts[0] + texts[1]
        assert live_targets(client) == [one.target]
    assert live_targets(client) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{one.target}/metrics")


def test_metrics_port_stays_listed_while_its_process_lives(client):
    with MetricsPort(client, CollectorRegistry(), host=HOST, ttl_s=0.3) as port:
        start = client.time()[0]
        eventually(lambda: client.time()[0] >= start + 2)
        assert live_targets(client) == [port.target]


def test_killed_process_is_unlisted(server, client):
    child = subprocess.Popen(
        [sys.executable, "-c", ONE_PORT, server.url], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout.readline() == "listed\n"
        assert len(live_targets(client)) == 1
        child.kill()
    eventually(lambda: live_targets(client) == [])


def test_redis_outage_is_logged_once_and_redis_is_found_again(server, caplog, monkeypatch):
    client = connect(server.url, timeout_s=0.3)  # time-out for a stopped server
    asked = Mock(wraps=client.time)
    monkeypatch.setattr(client, "time", asked)
    caplog.set_level("INFO", "tasc_serve.store_calls")
    with MetricsPort(client, registry_with("one"), host=HOST, ttl_s=0.1) as port:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            before = asked.call_count
            eventually(lambda: asked.call_count >= before + 3)
            assert httpx.get(f"http://{port.target}/metrics").status_code == 200
        finally:
            os.kill(server.pid, signal.SIGCONT)
        eventually(lambda: "works again" in caplog.text)
        eventually(lambda: live_targets(client) == [port.target])
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


def test_metrics_port_closes_without_redis(server, client, caplog):
    port = MetricsPort(client, CollectorRegistry(), host=HOST, ttl_s=10)
    server.close()
    port.close()
    assert "stays listed for up to 10 s" in caplog.text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{port.target}/metrics")
    port.close()
    with pytest.raises(StoreUnreachable):
        live_targets(client)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_wildcard_address_of_a_metrics_port_is_refused(client, host):
    with refused(SettingsError, "metrics.host"):
        MetricsPort(client, CollectorRegistry(), host=host, ttl_s=10)
    assert live_targets(client) == []
