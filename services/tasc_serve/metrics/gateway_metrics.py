"""Metrics of a gateway: requests, failovers, rate limits, waiting batches."""

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry

from tasc_serve.metrics.replica_metrics import E2E_S, Series
from tasc_store.batches.leases import Waiting

NO_TASK: Final = "-"  # no task can have this name
_LOSSES: Final = ("died", "silent", "broken")
_FAILOVER_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
_PROXY_S = (0.0002, 0.0005, *_FAILOVER_S[:9])
_NONE = Waiting(0, 0.0)


class GatewayMetrics:
    """The metrics of one gateway.

    Call each metric with the name of a served task and, if it has a further label, the label's
    value.

    All gateways of one store publish the same number of waiting batches, so use the maximum, not
    the sum.

    Args:
        registry: Registry of the series.
        tasks: Tasks whose waiting batches are exported from the start, at 0. Other tasks are
            exported once one of their batches waits.

    Raises:
        ValueError: The registry already holds these series.
    """

    def __init__(self, registry: CollectorRegistry, tasks: Sequence[str] = ()) -> None:
        self.registry = registry
        self._tasks = set(tasks)
        make = Series(registry, {}, "task")
        counters, gauges, histograms = make.counters, make.gauges, make.histograms
        self._requests = counters("http_requests", "HTTP requests answered.", "code")
        self._request_seconds = histograms(
            "http_request_duration_seconds",
            "Time from the first byte of a request to the last byte of its answer.",
            E2E_S,
        )
        self.proxy_seconds = histograms(
            "http_proxy_seconds",
            "Time from Ray Serve's HAProxy, when it has read a request's headers, to the gateway.",
            _PROXY_S,
        )
        self.replica_seconds = histograms(
            "http_replica_seconds",
            "Time that generating requests waited for a replica: connection, queue and engine.",
            E2E_S,
        )
        self.limited = counters(
            "rate_limited",
            "Requests answered with 429, by limit: of the key or of the task.",
            "limit",
        )
        self.ignored = counters(
            "ignored_messages",
            "Messages of answered requests that a task's format string did not use.",
        )
        self.failovers = counters(
            "failovers",
            "Calls that moved to another replica, because the first one died, was silent, or had a"
            " broken engine.",
            "reason",
        )
        self.failovers_refused = counters(
            "failovers_refused",
            "Calls that failed when they lost a replica: moved too often, or no retry budget left.",
        )
        self.failover_seconds = histograms(
            "failover_seconds",
            "Time from the loss of a replica to the next tokens of an answer, as clients saw it.",
            _FAILOVER_S,
        )
        self._replicas = gauges(
            "replicas_reachable", "Replicas that answered this gateway recently."
        )
        self._waiting = gauges("batch_waiting", "Batches that no worker holds.")
        self._oldest = gauges(
            "batch_oldest_waiting_seconds",
            "Time since the oldest waiting batch was created, or last held by a worker.",
        )
        self.set_batches({})

    def observe_http(self, task: str | None, code: int, seconds: float) -> None:
        """Counts one answered HTTP request.

        Args:
            task: The name of a served task; None if the request named no such task. Other names
                must not become labels, since each label lives as long as the process.
            code: The HTTP status.
            seconds: Seconds until the last byte was sent.
        """
        self._requests(task or NO_TASK, code).inc()
        self._request_seconds(task or NO_TASK).observe(seconds)

    def set_replicas(self, task: str, replicas: int) -> None:
        """Exports how many replicas of a task answer. From then on, its failovers are exported."""
        self._replicas(task).set(replicas)
        # At 0, as Prometheus does not count a series' first value as an increase.
        self.failovers_refused(task)
        for reason in _LOSSES:
            self.failovers(task, reason)

    def set_batches(self, waiting: Mapping[str, Waiting]) -> None:
        """Exports waiting batches by task; 0 for known tasks that are not in ``waiting``."""
        self._tasks |= waiting.keys()
        for task in self._tasks:
            found = waiting.get(task, _NONE)
            self._waiting(task).set(found.batches)
            self._oldest(task).set(found.oldest_s)
