"""The Serve deployment in front: the HTTP application over handles to the replicas.

It is the only file that knows both Ray Serve handles and HTTP.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
import redis
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from tasc_serve.api import create_api
from tasc_serve.calls import Answer, Call, Piece, Refusal, TaskStatus
from tasc_serve.discovery import MetricsPort, live_targets, node_address
from tasc_serve.errors import EngineBroken
from tasc_serve.http_errors import ApiError
from tasc_serve.settings import ServeSettings
from tasc_store import connect, translated

log = logging.getLogger(__name__)

# A replica that dies takes its requests with it; nothing was sent yet, so another may answer.
ATTEMPTS = 3
# The replica died or does not answer, its engine broke, or there is none at all.
LOST = (RayActorError, EngineBroken, DeploymentUnavailableError, BackPressureError)
SCRAPE_TIMEOUT_S = 2.0


class HandleBackend:
    """Replicas behind Ray Serve handles.

    A call whose replica dies before the first token was handed out is made again, up to
    ``ATTEMPTS`` times; the answer is the same, since a call carries its random numbers' seed.
    """

    def __init__(
        self,
        handles: dict[str, DeploymentHandle[Any]],
        client: redis.Redis,
        redis_url: str,
        own_target: str,
    ) -> None:
        self._handles = handles
        self._client = client
        self._url = redis_url
        self._own_target = own_target
        self._scraper = httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S)

    @property
    def tasks(self) -> Sequence[str]:
        return list(self._handles)

    async def complete(self, task: str, call: Call) -> Answer | Refusal:
        for attempt in range(1, ATTEMPTS + 1):
            response = self._handles[task].complete.remote(_again(call, attempt))
            try:
                answer: Answer | Refusal = await response
                return answer
            except asyncio.CancelledError:
                response.cancel()
                raise
            except LOST as error:
                _log_loss(task, call, attempt, error)
        raise _lost(task)

    async def stream(self, task: str, call: Call) -> AsyncGenerator[Piece | Refusal, None]:
        for attempt in range(1, ATTEMPTS + 1):
            again = _again(call, attempt)
            response: Any = self._handles[task].options(stream=True).stream.remote(again)
            begun = False
            try:
                async for item in response:
                    begun = True
                    yield item
                return
            except (asyncio.CancelledError, GeneratorExit):
                response.cancel()
                raise
            except LOST as error:
                _log_loss(task, call, attempt, error)
                if begun:
                    break
        raise _lost(task)

    async def status(self, task: str) -> TaskStatus:
        found: TaskStatus = await self._handles[task].status.remote()
        return found

    async def metrics(self) -> Sequence[str]:
        targets = await asyncio.to_thread(self.metrics_targets)
        others = [t for t in targets if t != self._own_target]
        texts = await asyncio.gather(*(self._scrape(t) for t in others))
        return [text for text in texts if text is not None]

    def metrics_targets(self) -> Sequence[str]:
        with translated(self._url):
            return live_targets(self._client)

    async def _scrape(self, target: str) -> str | None:
        """One process's metrics, or None when it is gone: its listing runs out by itself."""
        try:
            return (await self._scraper.get(f"http://{target}/metrics")).text
        except httpx.HTTPError as error:
            log.warning("metrics of %s cannot be read: %r", target, error)
            return None


class Gateway:
    """The ingress deployment.

    Args:
        handles: One handle per task, in the settings' order.
    """

    def __init__(
        self, settings: ServeSettings, redis_url: str, handles: dict[str, DeploymentHandle[Any]]
    ) -> None:
        client = connect(redis_url)
        self._limits = settings.gateway_limits
        self._registry = CollectorRegistry()
        host = settings.metrics.host or node_address()
        self._port = MetricsPort(client, self._registry, host=host, ttl_s=settings.metrics.ttl_s)
        self._backend = HandleBackend(handles, client, redis_url, self._port.target)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self._backend, self._limits, self._registry)

    def __del__(self) -> Any:
        if hasattr(self, "_port"):
            self._port.close()


def _again(call: Call, attempt: int) -> Call:
    """A lost replica may still be at work on the first attempt, so each has an id of its own."""
    return dataclasses.replace(call, id=f"{call.id}-{attempt}") if attempt > 1 else call


def _log_loss(task: str, call: Call, attempt: int, error: Exception) -> None:
    log.warning("task %s lost call %s (attempt %d): %s", task, call.id, attempt, error)


def _lost(task: str) -> ApiError:
    return ApiError(503, f"the replica answering for {task} died; try again")
