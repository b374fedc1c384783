"""Metrics ports of processes, the list of live ports in Redis, and the merged metrics text.

Prometheus scrapes each process separately, since a merged counter falls when a process ends.
"""

import logging
import operator
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
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
from tasc_store import StoreError
from tasc_store.keys import WRITE_PROBE

_Key = tuple[str, tuple[tuple[str, str], ...]]
_NO_SUMMANDS = ("_info", "_ratio", "_per_step", "_reachable", "_timestamp_seconds")
_OF_ONE_PROCESS = ("process_", "python_")  # sums of start times or file limits have no meaning


@dataclass(frozen=True)
class _Merged(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def merge(texts: Iterable[str]) -> str:
    """Sums samples with the same name and labels.

    Gauges that must not be summed, such as ratios, get the maximum.

    ``*_created`` series and the series of the process and Python collectors are left out.
    Histograms are expected to have the same buckets in every text.

    Raises:
        ValueError: A text is not in Prometheus text format, or two disagree on a series' type.
    """
    families: dict[str, Metric] = {}
    samples: defaultdict[str, dict[_Key, Sample]] = defaultdict(dict)
    for text in texts:
        for metric in text_string_to_metric_families(text):
            name, kind = metric.name, metric.type
            if name.endswith("_created") or name.startswith(_OF_ONE_PROCESS):
                continue
            known = families.setdefault(name, Metric(name, metric.documentation, kind))
            if kind != known.type:
                raise ValueError(
                    f"{name} is a {known.type} in one text and a {kind} in another; merge "
                    "processes of one release"
                )
            # A sum would turn a flag (1) into a count, and a share in [0, 1] into more than 1.
            join = max if kind == "gauge" and name.endswith(_NO_SUMMANDS) else operator.add
            for sample in metric.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                before, value = samples[name].get(key), sample.value
                value = value if before is None else join(before.value, value)
                samples[name][key] = Sample(sample.name, sample.labels, value)
    for name, family in families.items():
        family.samples = list(samples[name].values())
    return generate_latest(_Merged(families.values())).decode()


_TARGETS: Final = "tasc:metrics-targets"  # sorted set: host:port by its expiry time
_WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 (refused, not bound)
_LOOK_S: Final = 1.0
_LIST_S: Final = 2.0  # maximum wait for Redis when a port opens or closes
_log = logging.getLogger(__name__)


class MetricsPort:
    """Serves a registry on a free port and keeps that port listed until ``close()``.

    If Redis is unavailable, the process and the port continue. Renewal is retried; one line is
    logged when it begins to fail and one when it works again. Opening and closing the port wait for
    Redis at most two seconds.

    Args:
        client: Redis; it stays open when the port closes.
        registry: The registry to serve. Series ending in ``_created`` are left out, process-wide.
        host: Address to bind and to list; the scraper must be able to reach it.
        ttl_s: Seconds after which a process that ended without ``close()`` is no longer listed.

    Raises:
        SettingsError: ``host`` is a wildcard, which no scraper can reach.
        OSError: ``host`` is not an address of this machine.
    """

    def __init__(
        self, client: redis.Redis, registry: CollectorRegistry, *, host: str, ttl_s: float
    ) -> None:
        if host in _WILDCARDS:
            raise SettingsError(
                f"metrics.host is {host!r}, which a scraper cannot reach;"
                " set an address of this machine that the scraper can reach"
            )
        disable_created_metrics()
        self._client, self._ttl_s = client, ttl_s
        self._server, self._serving = start_http_server(0, addr=host, registry=registry)
        bracketed = f"[{host}]" if ":" in host else host
        self.target: Final = f"{bracketed}:{self._server.server_port}"
        self._closed = False
        self._renewing = RepeatedCall(
            f"listing metrics port {self.target}",
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
        """Stops renewal, removes the port from the list and closes it. Idempotent."""
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
        self._client.zremrangebyscore(_TARGETS, "-inf", now)  # ports of killed processes

    def _unlist(self) -> None:
        try:
            self._client.zrem(_TARGETS, self.target)
        except StoreError as error:
            self._stays_listed(error)

    def _stays_listed(self, reason: object) -> None:
        message = "metrics port %s stays listed for up to %g s: %s"
        _log.warning(message, self.target, self._ttl_s, reason)


def node_address() -> str:
    """This node's address for the other nodes of the Ray cluster."""
    import ray  # only used in a Ray cluster

    return str(ray.util.get_node_ip_address())


def live_targets(client: redis.Redis) -> list[str]:
    """The ``host:port`` of every live process, sorted.

    Raises:
        StoreError: Redis cannot be reached or returns an error.
    """
    targets = cast(list[bytes], client.zrangebyscore(_TARGETS, _now(client), "+inf"))
    return sorted(target.decode() for target in targets)


class StoreWatch:
    """Checks the store every second: whether it accepts writes, and the list of metrics ports.

    Entries expire while the store accepts no writes, although their processes are alive. So the
    known targets stay listed during this time and for a further ``ttl_s``, until all processes have
    renewed their entries.

    Args:
        client: Redis; it stays open.
        ttl_s: Lifetime of the entries.
        every_s: Seconds between two checks.

    Attributes:
        targets: The ``host:port`` of every live process, sorted.
    """

    def __init__(self, client: redis.Redis, ttl_s: float, every_s: float = _LOOK_S) -> None:
        self._client, self._ttl_s = client, ttl_s
        self._kept_until = 0.0
        self.targets: list[str] = []
        self._looks = RepeatedCall("the check of the store", self._look, every_s)

    @property
    def fault(self) -> str | None:
        """Why the store accepts no writes or does not answer; None if it accepts writes."""
        return self._looks.fault

    def close(self) -> None:
        """Stops checking; does not wait for Redis."""
        self._looks.close(0)

    def _look(self) -> None:
        try:
            # A write that a full server refuses, unlike UNLINK.
            self._client.set(WRITE_PROBE, "", px=1)
            targets = live_targets(self._client)
        except StoreError:
            self._kept_until = time.monotonic() + self._ttl_s
            raise
        kept = self.targets if time.monotonic() < self._kept_until else []
        self.targets = sorted({*targets, *kept})


def service_discovery(targets: list[str]) -> list[dict[str, object]]:
    """Targets in the format of Prometheus's HTTP service discovery."""
    return [{"targets": targets, "labels": {}}]


def _now(client: redis.Redis) -> float:
    """The time of Redis's clock, so that hosts with different clocks agree."""
    seconds, microseconds = client.time()
    return float(seconds) + float(microseconds) / 1e6
