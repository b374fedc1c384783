"""The ingress deployment: the HTTP application over the replicas of all tasks."""

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context
from functools import partial
from typing import Any

import httpx
import ray
import redis
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from tasc_runtime.protocol import TaskStatus
from tasc_runtime.ray_private import over_grpc
from tasc_serve.access.access_control import AccessControl, InFlight
from tasc_serve.http.api import create_api
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.http.proxy_guard import answer_directly
from tasc_serve.metrics.discovery import MetricsPort, StoreWatch, node_address
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.routing.failover import Failover, RetryBudget
from tasc_serve.routing.fleet import Fleet
from tasc_serve.routing.presence import present
from tasc_serve.routing.replica_client import ReplicaClient
from tasc_serve.settings import ServeSettings
from tasc_serve.store_calls import RepeatedCall
from tasc_serve.wire import AttachRequest
from tasc_store import IdempotencyStore, connect
from tasc_store.batches.leases import waiting_batches

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0
_COUNT_BATCHES_S = 5.0
_CLEAN_FILES_S = 600.0


class ReplicaBackend:
    """The replicas of all tasks, with one connection to each.

    Args:
        handles: One per task, in the settings' order.
        own_target: This process's own metrics port.
    """

    def __init__(
        self,
        handles: dict[str, DeploymentHandle[Any]],
        settings: ServeSettings,
        client: redis.Redis,
        own_target: str,
        metrics: GatewayMetrics,
    ) -> None:
        self._own_target = own_target
        self._scraper = httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S)
        self._store = StoreWatch(client, settings.metrics.ttl_s)
        self._replica_clients: list[ReplicaClient] = []
        self._fleets: dict[str, Fleet] = {}
        self._routers: dict[str, Failover] = {}
        self._watching: list[asyncio.Task[None]] = []
        failover = settings.failover
        node = ray.get_runtime_context().get_node_id()
        budget = RetryBudget(failover.retry_budget_ratio, failover.retry_budget_burst)
        for task, handle in handles.items():
            replicas = ReplicaClient(partial(_attach, handle), node, settings.connection)
            fleet = Fleet(
                task,
                partial(present, task),
                replicas.heartbeat,
                failover.heartbeat_timeout_s,
                partial(metrics.set_replicas, task),
                replicas.disconnect,
            )
            self._replica_clients.append(replicas)
            self._fleets[task] = fleet
            self._routers[task] = Failover(task, fleet, replicas, failover, budget, metrics)

    @property
    def tasks(self) -> Sequence[str]:
        return list(self._fleets)

    @property
    def store_fault(self) -> str | None:
        return self._store.fault

    def router(self, task: str) -> Failover:
        self.watch()
        return self._routers[task]

    def status(self, task: str) -> TaskStatus | None:
        self.watch()
        return self._fleets[task].status

    async def settled(self) -> None:
        self.watch()
        await asyncio.gather(*(fleet.settled() for fleet in self._fleets.values()))

    def watch(self) -> None:
        """Starts watching the replicas, on the event loop that answers requests."""
        if not self._watching:
            woken = (each.wake() for each in self._replica_clients)
            watched = (fleet.watch() for fleet in self._fleets.values())
            self._watching = [asyncio.create_task(each) for each in (*woken, *watched)]

    async def metrics(self) -> Sequence[str]:
        others = [t for t in self._store.targets if t != self._own_target]
        texts = await asyncio.gather(*(self._scrape(t) for t in others))
        return [text for text in texts if text is not None]

    def metrics_targets(self) -> Sequence[str]:
        return self._store.targets

    def close(self) -> None:
        self._store.close()

    async def _scrape(self, target: str) -> str | None:
        """Returns one process's metrics; None if it does not answer, e.g. because it has ended."""
        try:
            return (await self._scraper.get(f"http://{target}/metrics")).text
        except httpx.HTTPError as error:
            log.warning("metrics of %s cannot be read: %r", target, error)
            return None


def _attach(handle: DeploymentHandle[Any], request: AttachRequest) -> Any:
    """Sends ``request`` with a new Serve request id, not the id of the current HTTP request.

    Serve's router finds a waiting call by its id. If two calls have the same id, the router never
    routes the second call.
    """
    return Context().run(over_grpc(handle).attach.remote, request)


class Gateway:
    """The ingress deployment.

    Args:
        handles: One handle per task, in the settings' order.
    """

    def __init__(
        self, settings: ServeSettings, redis_url: str, handles: dict[str, DeploymentHandle[Any]]
    ) -> None:
        client = connect(redis_url)
        self._limits, self._cors_origins = settings.gateway_limits, settings.http.cors_origins
        self._attempts = IdempotencyStore(client, self._limits.idempotency_ttl_s)
        registry = CollectorRegistry()
        self._metrics = GatewayMetrics(registry, list(handles))
        self._in_flight = InFlight(settings.max_in_flight)
        self._access = AccessControl.of(settings, client, self._metrics)
        self._storage = BatchStorage.open(client, settings.files_url)
        # This query also ends batches that no worker took in time.
        self._queue = RepeatedCall(
            "counting batches",
            lambda: self._metrics.set_batches(waiting_batches(client)),
            _COUNT_BATCHES_S,
        )
        self._cleaning = RepeatedCall(
            "removing expired files", self._storage.files.clean, _CLEAN_FILES_S
        )
        host = settings.metrics.host or node_address()
        self._port = MetricsPort(client, registry, host=host, ttl_s=settings.metrics.ttl_s)
        self._backend = ReplicaBackend(handles, settings, client, self._port.target, self._metrics)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_api(
            self._backend,
            self._limits,
            self._metrics,
            in_flight=self._in_flight,
            access=self._access,
            attempts=self._attempts,
            storage=self._storage,
            cors_origins=self._cors_origins,
        )
        answer_directly(app)
        return app

    async def drain(self, timeout_s: float) -> int:
        """Admits no more requests, waits for admitted ones, and returns how many did not end."""
        return await self._in_flight.drain(timeout_s)

    def __del__(self) -> Any:
        for repeated in ("_queue", "_cleaning"):
            if hasattr(self, repeated):
                getattr(self, repeated).close(0)  # an unresponsive Redis must not delay the end
        for part in ("_backend", "_port", "_access"):
            if hasattr(self, part):
                getattr(self, part).close()
