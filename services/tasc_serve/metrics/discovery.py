"""Each process's metrics port, the list of live ones in Redis, and their merged text for people.

Prometheus itself scrapes each process: a merged counter falls when a process ends.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Final, Self, cast

import redis
from prometheus_client import (
    CollectorRegistry,
    Metric,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from tasc_runtime.errors import SettingsError
from tasc_serve.store_calls import RepeatedCall
from tasc_store import StoreError, translated
from tasc_store.client import url_of
from tasc_store.keys import WRITE_PROBE

_Key = tuple[str, tuple[tuple[str, str], ...]]
_NO_SUMMANDS = ("_info", "_ratio", "_per_step", "_reachable", "_timestamp_seconds")
_OF_ONE_PROCESS = ("process_", "python_")  # a sum of start times or file limits says nothing


class _Family:
    """One metric family and its samples over all texts, in the order they were first seen."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        # Summing would make of a mark (1) a count, and of a part in [0, 1] more than the whole.
        self._take_max = metric.type == "gauge" and metric.name.endswith(_NO_SUMMANDS)
        self._samples: dict[_Key, Sample] = {}

    def add(self, metric: Metric) -> None:
        if metric.type != self._metric.type:
            raise ValueError(
                f"{metric.name} is a {self._metric.type} in one text and a {metric.type} in"
                " another; merge processes of one release"
            )
        for sample in metric.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            known = self._samples.get(key)
            value = sample.value if known is None else self._join(known.value, sample.value)
            self._samples[key] = Sample(sample.name, sample.labels, value)

    def _join(self, left: float, right: float) -> float:
        return max(left, right) if self._take_max else left + right

    def metric(self) -> Metric:
        metric = Metric(self._metric.name, self._metric.documentation, self._metric.type)
        metric.samples = list(self._samples.values())
        return metric


class _Merged(Collector):
    def __init__(self, families: Iterable[_Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return (family.metric() for family in self._families)


def merge(texts: Iterable[str]) -> str:
    """Sum what has the same name and labels; gauges that are no summands take the greatest.

    ``*_created`` series and those of the process and Python collectors are left out. Histograms
    are expected to have the same buckets in every text.

    Raises:
        ValueError: A text is not in Prometheus text format, or two disagree on a series' type.
    """
    families: dict[str, _Family] = {}
    for text in texts:
        for metric in text_string_to_metric_families(text):
            if metric.name.endswith("_created") or metric.name.startswith(_OF_ONE_PROCESS):
                continue
            families.setdefault(metric.name, _Family(metric)).add(metric)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(families.values()))
    return generate_latest(registry).decode()


_TARGETS: Final = "tasc:metrics-targets"  # sorted set: host:port by the time it is forgotten
_WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 (refused, not bound)
_LOOK_S: Final = 1.0
_LIST_S: Final = 2.0  # that opening a port waits for Redis, and closing it
_log = logging.getLogger(__name__)


class MetricsPort:
    """Serves a registry on a free port and keeps that port listed until ``close()``.

    A Redis that is away stops neither the process nor the port: renewing goes on, one line is
    logged when it begins to fail and one when it works again. Neither opening nor closing the port
    waits for Redis longer than two seconds.

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
        self._closed = False
        self._renewing = RepeatedCall(
            f"list metrics port {self.target}",
            self._renew,
            ttl_s / 3,
            last=self._unlist,
            wait_s=_LIST_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop renewing, take the port off the list, close it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if not self._renewing.close(_LIST_S):
            self._stays_listed("Redis does not answer")
        self._server.shutdown()
        self._server.server_close()
        self._serving.join()

    def _renew(self) -> None:
        now = _now(self._client)
        self._client.zadd(_TARGETS, {self.target: now + self._ttl_s})
        self._client.zremrangebyscore(_TARGETS, "-inf", now)  # of processes that were killed

    def _unlist(self) -> None:
        try:
            self._client.zrem(_TARGETS, self.target)
        except redis.RedisError as error:
            self._stays_listed(error)

    def _stays_listed(self, reason: object) -> None:
        _log.warning("%s stays listed for up to %g s: %s", self.target, self._ttl_s, reason)


def node_address() -> str:
    """This node's address as the other nodes of the Ray cluster know it."""
    import ray  # only processes of a Ray cluster ask

    return str(ray.util.get_node_ip_address())


def live_targets(client: redis.Redis) -> list[str]:
    """The ``host:port`` of every live process, sorted.

    Raises:
        StoreError: Redis cannot be reached or refuses.
    """
    with translated(url_of(client)):
        targets = cast(list[bytes], client.zrangebyscore(_TARGETS, _now(client), "+inf"))
    return sorted(target.decode() for target in targets)


class StoreWatch:
    """Looks every second at the store: whether it takes writes, and which processes have metrics.

    Listings run out while the store takes no writes, although their processes live. So the targets
    known before stay listed meanwhile, and for ``ttl_s`` more, until all have renewed their own.

    Args:
        client: Redis; it stays open.
        ttl_s: That of the listings.
        every_s: Seconds between two looks.

    Attributes:
        targets: The ``host:port`` of every live process, sorted.
    """

    def __init__(self, client: redis.Redis, ttl_s: float, every_s: float = _LOOK_S) -> None:
        self._client, self._ttl_s = client, ttl_s
        self._kept_until = 0.0
        self.targets: list[str] = []
        self._looks = RepeatedCall("look at the store", self._look, every_s)

    @property
    def fault(self) -> str | None:
        """Why the store takes no writes, or does not answer; None if it does."""
        return self._looks.fault

    def close(self) -> None:
        """Look no more; does not wait for Redis."""
        self._looks.close(0)

    def _look(self) -> None:
        try:
            with translated(url_of(self._client)):
                # A full server refuses SET, too; it takes UNLINK.
                self._client.set(WRITE_PROBE, "", px=1)
            targets = live_targets(self._client)
        except StoreError:
            self._kept_until = time.monotonic() + self._ttl_s
            raise
        kept = self.targets if time.monotonic() < self._kept_until else []
        self.targets = sorted({*targets, *kept})


def service_discovery(targets: list[str]) -> list[dict[str, object]]:
    """Targets in the shape of Prometheus's HTTP service discovery."""
    return [{"targets": targets, "labels": {}}]


def _now(client: redis.Redis) -> float:
    """Redis's own clock, so that hosts whose clocks differ agree on what is past."""
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6
