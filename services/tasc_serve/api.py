"""The HTTP application: OpenAI-shaped endpoints over a backend of replicas.

It knows schemas, codes and deadlines; it knows neither Ray nor models.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tasc_serve import choices, http_errors, sse
from tasc_serve.answers import CHAT, COMPLETION, Reply, Shape
from tasc_serve.calls import Backend, Call, Refusal, TaskStatus
from tasc_serve.discovery import service_discovery
from tasc_serve.exposition import merge
from tasc_serve.formats import SHOWN
from tasc_serve.gateway_metrics import GatewayMetrics
from tasc_serve.http_errors import ApiError, of_refusal, of_unexpected, of_validation
from tasc_serve.reading import call_of
from tasc_serve.schemas import ChatRequest, CompletionRequest
from tasc_serve.settings import LimitSettings

Body = TypeVar("Body", bound=BaseModel)
STATUS_TIMEOUT_S = 5.0
_LARGE_BODY = 65_536  # bytes; less is read in a few milliseconds
_GONE = 499  # the client went away, as nginx counts it
log = logging.getLogger(__name__)


def create_api(backend: Backend, limits: LimitSettings, registry: CollectorRegistry) -> FastAPI:
    """Build the application; every route answers errors in the OpenAI shape."""
    app = FastAPI(title="tasc-serve", openapi_url="/openapi.json")
    http_errors.install(app)
    _add_generation(app, backend, limits, GatewayMetrics(registry))
    _add_listings(app, backend)
    _add_operations(app, backend, registry)
    return app


def _add_generation(
    app: FastAPI, backend: Backend, limits: LimitSettings, metrics: GatewayMetrics
) -> None:
    async def answer(request: Request, model: type[Any], shape: Shape) -> Response:
        began = time.perf_counter()
        task: str | None = None

        def done(code: int) -> None:
            metrics.observe_http(task, code, time.perf_counter() - began)

        try:
            raw = await _read(request, limits)
            if len(raw) > _LARGE_BODY:  # others' answers must not wait while it is read
                body = await asyncio.to_thread(_parsed, raw, model)
            else:
                body = _parsed(raw, model)
            task = _served(backend, body.model)
            if len(raw) > _LARGE_BODY:
                call = await asyncio.to_thread(call_of, body, limits)
            else:
                call = call_of(body, limits)
            reply = Reply.to(body, shape, task, call)
            if body.stream:
                return await _streamed(backend, call, reply, limits, done)
            content = await _whole(backend, call, reply, limits)
        except asyncio.CancelledError:
            done(_GONE)
            raise
        except Exception as error:
            done(error.status if isinstance(error, ApiError) else 500)
            raise
        done(200)
        return JSONResponse(content)

    @app.post("/v1/completions", openapi_extra=_documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await answer(request, CompletionRequest, COMPLETION)

    @app.post("/v1/chat/completions", openapi_extra=_documented(ChatRequest))
    async def chat(request: Request) -> Response:
        return await answer(request, ChatRequest, CHAT)


def _add_listings(app: FastAPI, backend: Backend) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(task) for task in backend.tasks]}

    @app.get("/v1/models/{task:path}")
    async def model(task: str) -> dict[str, Any]:
        return _model(_served(backend, task))

    @app.get("/v1/tasks")
    async def tasks() -> dict[str, Any]:
        return {"object": "list", "data": await _statuses(backend)}


def _add_operations(app: FastAPI, backend: Backend, registry: CollectorRegistry) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        statuses = await _statuses(backend)
        if not statuses:
            raise ApiError(503, "no task has a replica that answers")
        return {"status": "ready", "tasks": [s["task"] for s in statuses]}

    @app.get("/metrics")
    async def metrics() -> Response:
        texts = [generate_latest(registry).decode(), *await backend.metrics()]
        return PlainTextResponse(merge(texts), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @app.get("/sd")
    async def sd() -> list[dict[str, object]]:
        return service_discovery(list(await asyncio.to_thread(backend.metrics_targets)))


async def _statuses(backend: Backend) -> list[dict[str, Any]]:
    """The tasks that answer; one that does not must not take the others with it."""
    async with asyncio.timeout(2 * STATUS_TIMEOUT_S):
        found = await asyncio.gather(*(_status(backend, task) for task in backend.tasks))
    return [asdict(status) for status in found if status]


async def _status(backend: Backend, task: str) -> TaskStatus | None:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await backend.status(task)
    except Exception as error:
        log.warning("task %s does not answer: %r", task, error)
        return None


async def _read(request: Request, limits: LimitSettings) -> bytes:
    """The body, with a bound in bytes and in time."""
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.request_timeout_s):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > limits.max_body_bytes:
                    message = f"the body is larger than {limits.max_body_bytes} bytes; split it"
                    raise ApiError(413, message)
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time; send it faster") from error
    except ClientDisconnect as error:
        raise ApiError(_GONE, "the client went away before its body had arrived") from error
    return bytes(raw)


def _parsed(raw: bytes, model: type[Body]) -> Body:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise of_validation(error, raw) from error


def _model(task: str) -> dict[str, Any]:
    return {"id": task, "object": "model", "created": 0, "owned_by": "tasc-serve"}


def _served(backend: Backend, task: str) -> str:
    if task not in backend.tasks:
        known = ", ".join(backend.tasks)
        message = f"model {task[:SHOWN]!r} is not served here; there are {known}"
        raise ApiError(404, message, "model", "model_not_found")
    return task


async def _whole(
    backend: Backend, call: Call, reply: Reply, limits: LimitSettings
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(limits.request_timeout_s):
            return reply.whole(await choices.complete(backend, reply.task, call))
    except TimeoutError as error:
        raise _too_late(limits) from error


async def _streamed(
    backend: Backend,
    call: Call,
    reply: Reply,
    limits: LimitSettings,
    done: Callable[[int], None],
) -> StreamingResponse:
    """Wait for the first piece, so that a refusal still has a status code of its own."""
    deadline = asyncio.get_running_loop().time() + limits.request_timeout_s
    pieces = choices.stream(backend, reply.task, call)
    try:
        async with asyncio.timeout_at(deadline):
            first = await anext(pieces)
    except TimeoutError as error:
        raise _too_late(limits) from error
    if isinstance(first[1], Refusal):
        await pieces.aclose()
        raise of_refusal(first[1])

    return _Events(sse.events(reply, first, pieces), pieces, deadline, limits, done)


class _Events(StreamingResponse):
    """The events of one stream.

    However sending ends, and if it never began, the pieces are closed and the end is counted at
    once; Starlette leaves its iterators to the garbage collector.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        pieces: AsyncGenerator[choices.Numbered, None],
        deadline: float,
        limits: LimitSettings,
        done: Callable[[int], None],
    ) -> None:
        self._pieces, self._done = pieces, done
        self._deadline, self._limits = deadline, limits
        self._code = _GONE
        self._lines = self._ended(events)
        super().__init__(self._lines, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._done(self._code)
            async with aclosing(self._pieces), aclosing(self._lines):
                pass

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._pieces), aclosing(self._lines):
            await super().stream_response(send)

    async def _ended(self, events: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        try:
            async with asyncio.timeout_at(self._deadline):
                async for line in events:
                    yield line
            self._code = 200
        except Exception as error:
            failure = _failure(error, self._limits)
            self._code = failure.status
            yield sse.failure(failure)


def _failure(error: Exception, limits: LimitSettings) -> ApiError:
    if isinstance(error, TimeoutError):
        return _too_late(limits)
    return error if isinstance(error, ApiError) else of_unexpected(error, "a stream")


def _too_late(limits: LimitSettings) -> ApiError:
    return ApiError(504, f"no answer within {limits.request_timeout_s:g} s; try again later")


def _documented(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"content": {"application/json": schema}, "required": True}}
