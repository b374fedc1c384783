"""The HTTP application: OpenAI-shaped endpoints over a backend of replicas."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from tasc_runtime.protocol import Backend
from tasc_serve import http_errors
from tasc_serve.access.access_control import AccessControl, InFlight
from tasc_serve.access.idempotency import Idempotency
from tasc_serve.http.batches.batches_api import add_storage
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.http.generation import ENDPOINTS, Generation, served
from tasc_serve.http.schemas import documented
from tasc_serve.http_errors import ApiError
from tasc_serve.metrics.discovery import merge, service_discovery
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings
from tasc_store import IdempotencyStore

_Endpoint = Callable[[Request], Awaitable[Response]]


class Application(FastAPI):
    """A FastAPI application that answers the generating endpoints itself.

    Requests to these endpoints skip FastAPI's middleware, routing and dependencies, which take more
    CPU time than the rest of a request.

    Attributes:
        direct: The handlers of POST requests to the generating endpoints, by path.
        cors: The outermost middleware; None if scripts of web pages may not call the service.
    """

    direct: Mapping[str, _Endpoint] = MappingProxyType({})
    cors: CORSMiddleware | None = None

    def is_direct(self, scope: Scope) -> bool:
        """Whether a request is for one of the generating endpoints."""
        return self._endpoint(scope) is not None

    def _endpoint(self, scope: Scope) -> _Endpoint | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        return self.direct.get(scope["path"].removeprefix(scope.get("root_path", "")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.cors or self.plain)(scope, receive, send)

    async def plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request without the CORS middleware."""
        endpoint = self._endpoint(scope)
        if endpoint is None:
            if scope.get("method") == "HEAD":  # the server leaves out the body
                scope = {**scope, "method": "GET"}
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:
            response = http_errors.response_to(request, error)
        await response(scope, receive, send)


def create_api(
    backend: Backend,
    limits: LimitSettings,
    metrics: GatewayMetrics,
    *,
    access: AccessControl | None = None,
    in_flight: InFlight | None = None,
    attempts: IdempotencyStore | None = None,
    storage: BatchStorage | None = None,
    cors_origins: Sequence[str] = (),
) -> Application:
    """Builds the application; every route returns errors in the OpenAI shape.

    Args:
        access: Access control; unset: every request is allowed.
        in_flight: Decides whether requests are accepted; unset: always.
        attempts: Store of first attempts of idempotent requests; unset: none.
        storage: Storage of files and batches; unset: there are no endpoints for them.
        cors_origins: Origins of web pages whose scripts may call the service; ``*``: any.
    """
    access, in_flight = access or AccessControl(metrics), in_flight or InFlight()
    closing = ExitStack()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        with closing:
            yield

    app = Application(title="tasc-serve", openapi_url="/openapi.json", lifespan=lifespan)
    http_errors.install(app)
    idempotency = Idempotency(attempts, limits)
    closing.callback(idempotency.close)
    _add_generation(app, Generation(backend, limits, metrics, in_flight, access, idempotency))
    _add_listings(app, backend, access)
    if storage:
        closing.callback(add_storage(app, storage, limits, access, in_flight, cors_origins).close)
    _add_operations(app, backend, in_flight, metrics)
    if cors_origins:
        every = ("*",)
        app.cors = CORSMiddleware(app.plain, cors_origins, every, every, expose_headers=every)
    return app


def _add_generation(app: Application, generation: Generation) -> None:
    app.direct = {path: partial(generation.answer, each) for path, each in ENDPOINTS.items()}

    async def generate() -> Response:
        raise AssertionError("the application answers these itself")

    for path, endpoint in ENDPOINTS.items():
        # These routes serve only the API's description and requests with other methods.
        name = path.removeprefix("/v1/").replace("/", "_")
        app.post(path, name=name, openapi_extra=documented(endpoint.body))(generate)


def _add_listings(app: FastAPI, backend: Backend, access: AccessControl) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        visible = access.visible(await access.key_of(request), backend.tasks)
        return {"object": "list", "data": [_model(task) for task in visible]}

    @app.get("/v1/models/{task:path}")
    async def model(request: Request, task: str) -> dict[str, Any]:
        return _model(served(backend, access, await access.key_of(request), task))

    @app.get("/v1/tasks")
    async def tasks() -> dict[str, Any]:
        return {"object": "list", "data": await _statuses(backend)}


def _add_operations(
    app: FastAPI, backend: Backend, in_flight: InFlight, own: GatewayMetrics
) -> None:
    @app.get("/healthz")
    @app.get("/health")  # vLLM's path, which its clients request first
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        """Ready if any task answers; degraded, with status 200, if the store accepts no writes.

        Generation does not need the store.
        """
        in_flight.require_open()
        tasks = [status["task"] for status in await _statuses(backend)]
        if not tasks:
            raise ApiError(503, "no task has a replica that answers")
        if backend.store_fault:
            return {"status": "degraded", "tasks": tasks, "store": backend.store_fault}
        return {"status": "ready", "tasks": tasks}

    one_at_a_time = asyncio.Lock()  # a scrape reads every process, and needs no key

    @app.get("/metrics")
    async def metrics() -> Response:
        async with one_at_a_time:
            texts = [generate_latest(own.registry).decode(), *await backend.metrics()]
            merged = await asyncio.to_thread(merge, texts)
        return PlainTextResponse(merged, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/sd")
    async def sd() -> list[dict[str, object]]:
        return service_discovery(list(backend.metrics_targets()))


async def _statuses(backend: Backend) -> list[dict[str, Any]]:
    """The statuses of tasks that answer; a new gateway first waits for its replicas' status."""
    await backend.settled()
    found = (backend.status(task) for task in backend.tasks)
    return [asdict(status) for status in found if status]


def _model(task: str) -> dict[str, Any]:
    return {"id": task, "object": "model", "created": 0, "owned_by": "tasc-serve"}
