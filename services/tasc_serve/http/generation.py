"""The generating endpoints: from a request's bytes to its answer, whole or as events."""

import asyncio
import logging
import os
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tasc_protocol import Request
from tasc_runtime.protocol import Backend, Refusal
from tasc_runtime.sampling_options import SHOWN
from tasc_serve.access.access_control import AccessControl, InFlight, Permit
from tasc_serve.access.idempotency import Idempotency, IdempotentRequest
from tasc_serve.http.classify_api import ClassifyReply, ClassifyRequest
from tasc_serve.http.decisions_api import DecisionsReply, DecisionsRequest, about_questions
from tasc_serve.http.parsing import (
    CLIENT_CLOSED_REQUEST,
    GenerationBody,
    parsed,
    read_body,
    requests_of,
)
from tasc_serve.http.ray_proxy import ARRIVAL
from tasc_serve.http.responses import CHAT, COMPLETION, Reply, json_of
from tasc_serve.http.responses_api import ResponsesReply, ResponsesRequest, in_its_words
from tasc_serve.http.schemas import ChatRequest, CompletionRequest
from tasc_serve.http_errors import ApiError, of_refusal, of_unexpected
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.routing import choices
from tasc_serve.settings import LimitSettings
from tasc_store import ApiKey
from tasc_text import Conversation

log = logging.getLogger(__name__)

_LONGEST_PROXY_S = 60.0
_DIGITS = 20  # maximum digits of a time in microseconds
_LARGE_BODY = 65_536  # bytes; smaller bodies are parsed in a few milliseconds
_MANY_TOKENS = 256  # with log-probabilities; fewer are formatted in a few milliseconds
_MOST_NAMED = 20  # maximum messages in a header
IGNORED = "x-tasc-ignored"
_EVENTS, _JSON = "text/event-stream", "application/json"
# Proxies such as nginx would otherwise buffer events, or cache them.
_UNBUFFERED: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_KEEP_ALIVE: Final = b": keep-alive\n\n"
_Result = TypeVar("_Result")
_Reply = Reply | ResponsesReply
_WholeReply = _Reply | ClassifyReply | DecisionsReply


@dataclass(frozen=True)
class GenerationEndpoint:
    """How one endpoint reads a body and formats the answer.

    Attributes:
        body: The pydantic model of the request body.
        reply: Makes the reply from a body, its task and its requests.
        reworded: Converts an error to the field names of this endpoint.
    """

    body: type[GenerationBody]
    reply: Callable[..., _WholeReply]
    reworded: Callable[[ApiError], ApiError] = lambda error: error


ENDPOINTS: Final[Mapping[str, GenerationEndpoint]] = {
    "/v1/completions": GenerationEndpoint(CompletionRequest, partial(Reply, COMPLETION)),
    "/v1/chat/completions": GenerationEndpoint(ChatRequest, partial(Reply, CHAT)),
    "/v1/responses": GenerationEndpoint(ResponsesRequest, ResponsesReply, in_its_words),
    "/v1/classify": GenerationEndpoint(ClassifyRequest, ClassifyReply),
    "/v1/decisions": GenerationEndpoint(DecisionsRequest, DecisionsReply, about_questions),
}


class RequestScope:
    """One HTTP request, from its first byte to the last byte of its answer.

    `done` must be called exactly once.

    Attributes:
        task: The served task that the request names; None until it is known.
    """

    def __init__(self, request: HttpRequest, in_flight: InFlight, metrics: GatewayMetrics) -> None:
        self.task: str | None = None
        self._metrics = metrics
        self._began = time.perf_counter()
        self._proxy_s = _since(request.headers.get(ARRIVAL))
        self._replica_s: float | None = None
        self._in_flight = in_flight
        self._inside = False

    def enter(self) -> None:
        """Enters the scope; raises ApiError if the gateway is being stopped or is full."""
        self._in_flight.enter()
        self._inside = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks a block that waits for replicas."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._replica_s = (self._replica_s or 0.0) + time.perf_counter() - began

    def done(self, code: int) -> None:
        if self._inside:
            self._in_flight.leave()
        self._inside = False
        if self._replica_s is not None and self.task:
            self._metrics.replica_seconds(self.task).observe(self._replica_s)
        self._metrics.observe_http(self.task, code, time.perf_counter() - self._began)
        if self._proxy_s is not None and self.task:
            self._metrics.proxy_seconds(self.task).observe(self._proxy_s)


class Generation:
    """Answers generating requests of all tasks."""

    def __init__(
        self,
        backend: Backend,
        limits: LimitSettings,
        metrics: GatewayMetrics,
        in_flight: InFlight,
        access: AccessControl,
        idempotency: Idempotency,
    ) -> None:
        self._backend = backend
        self._limits = limits
        self._metrics = metrics
        self._in_flight = in_flight
        self._access = access
        self._idempotency = idempotency

    async def answer(self, endpoint: GenerationEndpoint, request: HttpRequest) -> Response:
        """Returns the response. Every error is counted, and raised."""
        scope = RequestScope(request, self._in_flight, self._metrics)
        try:
            scope.enter()
            response = await self._answered(request, endpoint, scope)
        except asyncio.CancelledError:
            scope.done(CLIENT_CLOSED_REQUEST)
            raise
        except ApiError as error:
            scope.done(error.status)
            raise endpoint.reworded(error) from error.__cause__
        except Exception:
            scope.done(500)
            raise
        if not isinstance(response, _Events):
            scope.done(response.status_code)
        return response

    async def _answered(
        self, request: HttpRequest, endpoint: GenerationEndpoint, scope: RequestScope
    ) -> Response:
        key = await self._access.key_of(request)
        raw = await read_body(request, self._limits)
        long = len(raw) > _LARGE_BODY
        body: GenerationBody = await _aside(long, partial(parsed, raw, endpoint.body))
        scope.task = task = served(self._backend, self._access, key, body.model)
        permit = self._access.admit(key, task, min(body.prompt_count, self._limits.max_prompts))
        retry_key = self._idempotency.key_of(request, key.id if key else "")
        version = None  # one version of the record makes all answers to a request and its retries
        if retry_key or body.prompt_count * (body.n or 1) > 1:
            status = self._backend.status(task)
            version = status.record_version if status else None
        id, seed = (retry_key.id, retry_key.seed) if retry_key else (os.urandom(16).hex(), None)
        asked = await _aside(long, partial(requests_of, body, self._limits, id, seed, version))
        retry = None
        if retry_key:
            retry = await self._idempotency.claim(retry_key, request, raw, task, version)
            known_headers = {**permit.headers, **(_UNBUFFERED if body.stream else {})}
            if known := retry.response(_EVENTS if body.stream else _JSON, known_headers):
                return known
            asked = choices.pinned(asked, retry.record_version)
        reply = endpoint.reply(body, task, asked)
        if body.stream and isinstance(reply, _Reply):
            return await self._streamed(request, asked, reply, scope, permit, retry)
        with scope.waiting():
            async with _WhileConnected(request), _in_time(asked[0].timeout_s):
                answers = await choices.complete(self._backend.router(task), asked)
        permit.spend(sum(r.acceptance.steps if r.scores else len(r.tokens) for r, _ in answers))
        many = sum(r.scores.count if r.scores else len(t) for r, t in answers) > _MANY_TOKENS
        encoded = await _aside(many, lambda: json_of(reply.whole(answers)))
        if retry:
            retry.keep(encoded)
        headers = {**permit.headers, **self._ignored(task, asked)}
        return Response(encoded, headers=headers, media_type=_JSON)

    async def _streamed(
        self,
        request: HttpRequest,
        asked: Sequence[Request],
        reply: _Reply,
        scope: RequestScope,
        permit: Permit,
        retry: IdempotentRequest | None,
    ) -> StreamingResponse:
        """Streams the answer; waits briefly for admission, so that a refusal sets the status code.

        If admission takes longer, the headers are sent first, since proxies give up on a silent
        service. A refusal is then sent as an event.
        """
        deadline = asyncio.get_running_loop().time() + (asked[0].timeout_s or 0)
        patience_s = min(self._limits.stream_keep_alive_s, asked[0].timeout_s or 0)
        pieces = _Pieces(permit.counting(choices.stream(self._backend.router(reply.task), asked)))
        try:
            with scope.waiting():
                async with _WhileConnected(request):
                    await asyncio.wait({pieces.first}, timeout=patience_s)
            if pieces.first.done():
                _, first = pieces.first.result()
                if isinstance(first, Refusal):
                    raise of_refusal(first)
            elif patience_s != self._limits.stream_keep_alive_s:
                raise _too_late(asked[0].timeout_s)
        except BaseException:
            await pieces.aclose()
            raise
        events = reply.events(pieces.first, pieces.rest)
        if retry:
            events = retry.keeping(events)
        headers = {**permit.headers, **self._ignored(reply.task, asked), **_UNBUFFERED}
        return _Events(
            events,
            reply.failure,
            pieces,
            deadline,
            self._limits,
            asked[0].timeout_s,
            scope,
            headers,
        )

    def _ignored(self, task: str, asked: Sequence[Request]) -> Mapping[str, str]:
        """Returns a header that lists the messages that are not in the prompt, and counts them.

        Only the status of a replica tells the gateway whether the task has a chat template.
        """
        prompt = asked[0].prompt
        if not isinstance(prompt, Conversation) or len(prompt.messages) == 1:
            return {}
        status = self._backend.status(task)
        if not status or status.chat or not (ignored := prompt.ignored):
            return {}
        self._metrics.ignored(task).inc(len(ignored))
        shown = ", ".join(ignored[:_MOST_NAMED])
        more = len(ignored) - _MOST_NAMED
        return {IGNORED: f"{shown} and {more} more" if more > 0 else shown}


class _WhileConnected:
    """A block that is cancelled when the client disconnects. The body must have been read.

    Raises:
        ApiError: 499: the client disconnected.
    """

    def __init__(self, request: HttpRequest) -> None:
        self._request = request
        self._inside = True
        self._gone = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._watch = asyncio.ensure_future(self._request.receive())
        self._watch.add_done_callback(self._left)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside = False
        self._watch.cancel()
        if self._gone and self._task:
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise ApiError(CLIENT_CLOSED_REQUEST, "the client went away") from error

    def _left(self, watch: asyncio.Future[Message]) -> None:
        if self._inside and not watch.cancelled() and not watch.exception() and self._task:
            self._gone = True
            self._task.cancel()


class _Pieces:
    """The pieces of a stream; waiting for the first one starts at once."""

    def __init__(self, pieces: AsyncGenerator[choices.Numbered, None]) -> None:
        self.rest = pieces
        self.first = asyncio.create_task(self._next())

    async def _next(self) -> choices.Numbered:
        return await anext(self.rest)

    async def aclose(self) -> None:
        self.first.cancel()
        await asyncio.gather(self.first, return_exceptions=True)
        await self.rest.aclose()


class _SteadySend:
    """A block that sends a stream, with comments when nothing else is sent.

    The block is cancelled when a client takes too long to read.

    Args:
        longest_s: Maximum time of one `send`; detection may take slightly longer.
        keep_alive_s: Maximum time without sending.
    """

    def __init__(self, send: Send, longest_s: float, keep_alive_s: float) -> None:
        self._send, self._longest_s, self._keep_alive_s = send, longest_s, keep_alive_s
        self._shortest_s = min(longest_s, keep_alive_s)
        self._sending = False
        self._comment: asyncio.Task[None] | None = None
        self._failed: OSError | None = None
        self._stalled = False

    async def send(self, message: Message) -> None:
        if self._comment:  # the last message must not overtake the comment
            await self._comment
            self._comment = None
        self._since, self._sending = self._loop.time(), True
        await self._send(message)
        self._sending = False

    async def __aenter__(self) -> Send:
        self._loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._shortest_s, self._look)
        return self.send

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._timer.cancel()
        if self._comment:
            self._comment.cancel()
        if not (self._stalled or self._failed):
            return False
        nobody_else = self._task.uncancel() <= self._cancelling
        if not (nobody_else and isinstance(error, asyncio.CancelledError)):
            return False
        if self._failed:
            raise self._failed
        return True

    def _look(self) -> None:
        """Runs on one timer per stream, since a timer for each send would be costly."""
        now = self._loop.time()
        if self._sending and now - self._since >= self._longest_s:
            log.warning("a client did not read for %g s; its stream is cut", self._longest_s)
            self._stalled = True
            self._task.cancel()
            return
        if not self._sending and now - self._since >= self._keep_alive_s:
            self._since, self._sending = now, True
            self._comment = asyncio.create_task(self._keep_alive())
        ends = self._since + (self._longest_s if self._sending else self._keep_alive_s)
        self._timer = self._loop.call_at(min(ends, now + self._shortest_s), self._look)

    async def _keep_alive(self) -> None:
        try:
            await self._send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
        except OSError as error:  # the client has disconnected
            self._failed = error
            self._task.cancel()
        self._sending = False


class _Events(StreamingResponse):
    """The events of one stream.

    When sending ends, or if it never begins, the pieces are closed and the request is counted at
    once. Starlette would leave the iterators to the garbage collector.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        failure: Callable[[ApiError], str],
        pieces: _Pieces,
        deadline: float,
        limits: LimitSettings,
        timeout_s: float | None,
        scope: RequestScope,
        headers: Mapping[str, str],
    ) -> None:
        self._pieces, self._scope, self._failure = pieces, scope, failure
        self._deadline, self._limits, self._timeout_s = deadline, limits, timeout_s
        self._code = CLIENT_CLOSED_REQUEST
        self._events = self._ended(events)
        super().__init__(self._events, headers=headers, media_type=_EVENTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._scope.done(self._code)
            async with aclosing(self._pieces), aclosing(self._events):
                pass

    async def stream_response(self, send: Send) -> None:
        # Otherwise a client that does not read would keep its place in this gateway.
        limits = self._limits
        steady = _SteadySend(send, limits.request_timeout_s, limits.stream_keep_alive_s)
        async with aclosing(self._pieces), aclosing(self._events), steady as timed:
            await super().stream_response(timed)

    async def _ended(self, events: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        try:
            while True:
                # Sending is not limited by the deadline: a slow reader's answer is not late.
                with self._scope.waiting():
                    async with asyncio.timeout_at(self._deadline):
                        event = await anext(events, None)
                if event is None:
                    break
                yield event
            self._code = 200
        except Exception as error:
            failed = _failure(error, self._timeout_s)
            self._code = failed.status
            yield self._failure(failed)


def _since(arrival: str | None) -> float | None:
    """Seconds since HAProxy received a request; None if the header is missing or implausible."""
    if arrival is None or not arrival.isdecimal():
        return None
    seconds = time.time() - int(arrival[:_DIGITS]) / 1e6
    return seconds if 0 <= seconds < _LONGEST_PROXY_S else None


async def _aside(long: bool, work: Callable[[], _Result]) -> _Result:
    """Runs ``work`` on a thread if it takes ``long``, so that other answers do not wait."""
    return await asyncio.to_thread(work) if long else work()


def served(backend: Backend, access: AccessControl, key: ApiKey | None, task: str) -> str:
    """Returns the name of a served task; raises ApiError 403 or 404 for others."""
    access.allow(key, task)
    if task not in backend.tasks:
        known = ", ".join(access.visible(key, backend.tasks))
        message = f"model {task[:SHOWN]!r} is not served here; served models: {known}"
        raise ApiError(404, message, "model", "model_not_found")
    return task


@asynccontextmanager
async def _in_time(timeout_s: float | None) -> AsyncGenerator[None, None]:
    """Limits the time of a block; raises ApiError 504 if it takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise _too_late(timeout_s) from error


def _failure(error: Exception, timeout_s: float | None) -> ApiError:
    if isinstance(error, TimeoutError):
        return _too_late(timeout_s)
    return error if isinstance(error, ApiError) else of_unexpected(error, "a stream")


def _too_late(timeout_s: float | None) -> ApiError:
    return ApiError(504, f"no answer within {timeout_s or 0:g} s; try again later")
