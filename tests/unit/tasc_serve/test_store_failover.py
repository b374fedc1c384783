"""Tests the failover of Redis behind one address, with two real servers and a forwarder."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from fake_backend import FakeBackend, Service
from prometheus_client import CollectorRegistry
from storage_service import FORM, line

from forwarder import HOST, Forwarder
from support import eventually
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.metrics.discovery import MetricsPort, StoreWatch, live_targets
from tasc_store import EmbeddedRedis, connect

pytestmark = pytest.mark.redis


def port_of(server: EmbeddedRedis) -> int:
    return int(server.url.rpartition(":")[2].removesuffix("/0"))


class Pair:
    """A primary and its replica, which can be swapped, and a client of the forwarder."""

    def __init__(self, stack: ExitStack) -> None:
        servers = [stack.enter_context(EmbeddedRedis.start()) for _ in range(2)]
        self.primary, self.replica = servers
        self.direct = {s.url: stack.enter_context(redis.Redis.from_url(s.url)) for s in servers}
        self.follow(self.replica, self.primary)
        self.forwarder = Forwarder(port_of(self.primary))
        stack.callback(self.forwarder.close)
        self.client = stack.enter_context(connect(self.forwarder.url))

    def follow(self, replica: EmbeddedRedis, primary: EmbeddedRedis) -> None:
        at = self.direct[replica.url]
        at.replicaof(HOST, port_of(primary))
        eventually(lambda: at.info("replication")["master_link_status"] == "up")

    def promote(self) -> None:
        """Swap the two; the forwarder sends to the former primary until `redirect`."""
        self.direct[self.primary.url].wait(1, 10_000)
        self.direct[self.replica.url].replicaof("NO", "ONE")
        self.primary, self.replica = self.replica, self.primary
        self.follow(self.replica, self.primary)

    def redirect(self) -> None:
        self.forwarder.port = port_of(self.primary)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


class Watched(FakeBackend):
    """A backend that answers, and reports the state of the store like a gateway."""

    def __init__(self, watch: StoreWatch) -> None:
        self._watch = watch
        super().__init__()

    store_fault = property(lambda self: self._watch.fault, lambda self, fault: None)

    def metrics_targets(self) -> list[str]:
        return self._watch.targets


def test_gateway_is_degraded_during_a_redis_failover_and_then_recovers(
    pair: Pair, tmp_path: Path
) -> None:
    ttl_s = 1.0
    with ExitStack() as stack:
        port = MetricsPort(pair.client, CollectorRegistry(), host=HOST, ttl_s=ttl_s)
        watch = StoreWatch(pair.client, ttl_s, every_s=0.02)
        stack.callback(watch.close)
        stack.callback(port.close)
        storage = BatchStorage(pair.client, str(tmp_path))
        service = Service(Watched(watch), storage=storage, file_timeout_s=2.0)
        shown: list[list[str]] = []

        def get(path: str) -> object:
            shown.append(service.ask("GET", "/sd").json()[0]["targets"])
            found = service.ask("GET", path)
            assert found.status_code == 200  # a load balancer goes on sending chats
            return found.json()["status"]

        def upload() -> int:
            files = {"file": ("in.jsonl", line().encode())}
            return service.ask("POST", "/v1/files", data=FORM, files=files).status_code

        eventually(lambda: watch.targets == [port.target])
        assert (get("/readyz"), upload()) == ("ready", 200)
        pair.promote()
        eventually(lambda: get("/readyz") == "degraded")
        assert upload() == 503
        with redis.Redis.from_url(pair.replica.url) as stale:
            eventually(lambda: live_targets(stale) == [])  # the listing has run out
        pair.redirect()
        eventually(lambda: get("/readyz") == "ready")
        assert upload() == 200
        get("/readyz")
        assert all(targets == [port.target] for targets in shown)


def test_idle_connections_are_dropped_after_one_refused_write(pair) -> None:
    pool = pair.client.connection_pool
    for connection in [pool.get_connection() for _ in range(4)]:
        pool.release(connection)
    pair.promote()
    pair.redirect()
    with pair.client.pipeline() as pipe:
        pipe.set("key", "new")
        pipe.set("other", "new")
        assert pipe.execute() == [True, True]
    used = [pool.get_connection() for _ in range(4)]
    for connection in used:
        connection.send_command("ROLE")
    assert {connection.read_response()[0] for connection in used} == {b"master"}
    for connection in used:
        pool.release(connection)


def test_registered_lua_script_runs_after_a_redis_failover(pair: Pair) -> None:
    write = pair.client.register_script("return redis.call('INCR', KEYS[1])")
    assert write(["n"]) == 1
    pair.promote()
    pair.redirect()
    assert write(["n"]) == 2


def test_full_store_makes_the_service_degraded(pair: Pair) -> None:
    watch = StoreWatch(pair.client, 1.0, every_s=0.02)
    pair.client.config_set("maxmemory", 1)
    eventually(lambda: "maxmemory" in (watch.fault or ""))
    pair.client.config_set("maxmemory", 0)
    eventually(lambda: watch.fault is None)
    watch.close()
