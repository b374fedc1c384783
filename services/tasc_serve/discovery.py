"""Each process's metrics port, and the list of the live ones in Redis. It reads no metric."""

import logging
import threading
from types import TracebackType
from typing import Final, Self, cast

import redis
from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

from tasc_serve.errors import SettingsError
from tasc_store import translated
from tasc_store.client import url_of

_TARGETS: Final = "tasc:metrics-targets"  # sorted set: host:port by the time it is forgotten
_WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 (refused, not bound)
_log = logging.getLogger(__name__)


class MetricsPort:
    """Serves a registry on a free port and keeps that port listed until ``close()``.

    A Redis that is away stops neither the process nor the port: renewing goes on, one line is
    logged when it begins to fail and one when it works again.

    Args:
        client: Redis; it stays open when the port closes.
        registry: What to serve. Series ending in ``_created`` are left out, process-wide.
        host: Address to bind and to list, so one that the scraper reaches.
        ttl_s: Seconds after which a process that ended without ``close()`` is no longer listed.

    Raises:
        SettingsError: ``host`` is a wildcard, which no scraper can reach.
        OSError: ``host`` is no address of this machine.
    """

    def __init__(
        self, client: redis.Redis, registry: CollectorRegistry, *, host: str, ttl_s: float
    ) -> None:
        if host in _WILDCARDS:
            raise SettingsError(
                f"metrics.host is {host!r}, which a scraper cannot reach;"
                " set the address of this machine that it can"
            )
        disable_created_metrics()
        self._client, self._ttl_s = client, ttl_s
        self._server, self._serving = start_http_server(0, addr=host, registry=registry)
        bracketed = f"[{host}]" if ":" in host else host
        self.target: Final = f"{bracketed}:{self._server.server_port}"
        self._reached = True
        self._closing = threading.Event()
        self._renew()
        self._renewing = threading.Thread(target=self._keep, name="metrics-port", daemon=True)
        self._renewing.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop renewing, take the port off the list, close it. A second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._renewing.join()
        try:
            self._client.zrem(_TARGETS, self.target)
        except redis.RedisError as error:
            _log.warning("%s stays listed for up to %g s: %s", self.target, self._ttl_s, error)
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()

    def _keep(self) -> None:
        while not self._closing.wait(self._ttl_s / 3):
            self._renew()

    def _renew(self) -> None:
        try:
            self._client.zadd(_TARGETS, {self.target: _now(self._client) + self._ttl_s})
        except redis.RedisError as error:
            if self._reached:
                _log.warning("metrics port %s is not listed, will retry: %s", self.target, error)
            self._reached = False
            return
        if not self._reached:
            _log.info("metrics port %s is listed again", self.target)
        self._reached = True


def node_address() -> str:
    """This node's address as the other nodes of the Ray cluster know it."""
    import ray  # only processes of a Ray cluster ask

    return str(ray.util.get_node_ip_address())


def live_targets(client: redis.Redis) -> list[str]:
    """The ``host:port`` of every live process, sorted; those past their time are removed.

    Raises:
        StoreError: Redis cannot be reached or refuses.
    """
    with translated(url_of(client)):
        client.zremrangebyscore(_TARGETS, "-inf", _now(client))
        targets = cast(list[bytes], client.zrange(_TARGETS, 0, -1))
    return sorted(target.decode() for target in targets)


def service_discovery(targets: list[str]) -> list[dict[str, object]]:
    """Targets in the shape of Prometheus's HTTP service discovery."""
    return [{"targets": targets, "labels": {}}]


def _now(client: redis.Redis) -> float:
    """Redis's own clock, so that hosts whose clocks differ agree on what is past."""
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6
