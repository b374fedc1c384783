"""A backend that plays a script, so that the HTTP surface can be tested without Ray and models."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import httpx
from fastapi import FastAPI
from msgspec import structs
from prometheus_client import CollectorRegistry

from support import asgi
from tasc_engine import Acceptance, GenerationResult, Timings
from tasc_protocol import Output, Request, TokenText
from tasc_runtime.protocol import Refusal, TaskStatus
from tasc_serve.access.access_control import AccessControl, InFlight
from tasc_serve.http.api import create_api
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings

FOREVER: Final = "wait for ever"
TASK: Final = "greet"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGE: Final = {"role": "user", "content": "hi"}
# A good request to each endpoint.
GOOD: Final[dict[str, dict[str, object]]] = {
    COMPLETIONS: {"model": TASK, "prompt": "hi"},
    CHAT: {"model": TASK, "messages": [MESSAGE]},
}
STATUS: Final = TaskStatus(TASK, 1, "model", None, "f" * 32, 512, 8, 3, 100, 4096)

ADMITTED: Final = Output("id", record_version=1)  # a replica sends this before a row is free

Item = Output | Refusal | Exception | str | float


class FakeBackend:
    """Plays the same script for every call, or the script in ``by_choice`` of the call's choice.

    A number in it is a pause in seconds. It notes the calls and how many are still open.
    """

    tasks = (TASK,)
    settles_to: TaskStatus | None = None

    def __init__(
        self,
        *script: Item,
        status: TaskStatus | None = STATUS,
        by_choice: Mapping[int, Sequence[Item]] | None = None,
        store_fault: str | None = None,
    ) -> None:
        self.script = script
        self.by_choice = by_choice or {}
        self.calls: list[Request] = []
        self.open = 0
        self._status = status
        self.store_fault = store_fault

    def router(self, task: str) -> "FakeBackend":
        assert task == TASK
        return self

    async def complete(self, call: Request) -> Output | Refusal:
        text, tokens = "", ()
        async with aclosing(self.stream(call)) as items:
            async for item in items:
                if isinstance(item, Refusal):
                    return item
                text, tokens = text + item.text, tokens + item.token_texts
                if item.result:
                    assert text == item.result.text
                    return Output("id", result=item.result, token_texts=tokens)
        raise AssertionError("the script has no end")

    async def stream(self, call: Request) -> AsyncGenerator[Output | Refusal, None]:
        self.calls.append(call)
        self.open += 1
        try:
            place = call.prompt_index * call.n + call.choice_index
            for item in self.by_choice.get(place, self.script):
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                elif isinstance(item, str):
                    await asyncio.Event().wait()
                else:
                    yield item
        finally:
            self.open -= 1

    async def settled(self) -> None:
        self._status = self._status or self.settles_to

    def status(self, task: str) -> TaskStatus | None:
        return self._status and replace(self._status, task=task)

    async def metrics(self) -> Sequence[str]:
        return ["# TYPE held gauge\nheld 1\n", "# TYPE held gauge\nheld 2\n"]

    def metrics_targets(self) -> Sequence[str]:
        return ["127.0.0.1:1", "127.0.0.1:2"]


def answer(*texts: str, reason: str = "stop", logprobs: int | None = None) -> list[Output]:
    """The outputs of one answer, of two tokens each; with logprobs each token has half its text."""
    whole = tuple(range(2 * len(texts)))
    result = GenerationResult(
        *("id", whole, "".join(texts), reason),
        prompt_tokens=5,
        timings=Timings(queued=0.5, first_token=1.5, total=3.5),
        acceptance=Acceptance(drafted=(3, 0, 2), accepted=(3, 0, 0)),
        index_version=7,
    )
    outputs, offset = [], 0
    for text in texts:
        tokens = () if logprobs is None else _halves(text, offset, logprobs)
        outputs.append(Output("id", text=text, token_texts=tokens))
        offset += len(text)
    return [*outputs[:-1], structs.replace(outputs[-1], result=result)]


def _halves(text: str, offset: int, logprobs: int) -> tuple[TokenText, TokenText]:
    middle = len(text) // 2
    top = tuple((letter.encode(), -1.0 - i) for i, letter in enumerate("abcdefghij"[:logprobs]))
    first = TokenText(text[:middle].encode(), -0.25, offset, top)
    return first, TokenText(text[middle:].encode(), -0.5, offset + middle, top)


class Service:
    """The application over a backend; it gets one request at a time."""

    def __init__(
        self,
        backend: FakeBackend,
        *,
        access: Callable[[GatewayMetrics], AccessControl] | None = None,
        attempts: Any = None,
        storage: BatchStorage | None = None,
        cors_origins: Sequence[str] = (),
        **limits: float,
    ) -> None:
        self.backend, self.registry, self.in_flight = backend, CollectorRegistry(), InFlight()
        metrics = GatewayMetrics(self.registry)
        self.app: FastAPI = create_api(
            backend,
            LimitSettings(**limits),
            metrics,
            access=access and access(metrics),
            in_flight=self.in_flight,
            attempts=attempts,
            storage=storage,
            cors_origins=cors_origins,
        )

    def ask(self, method: str, path: str, **request: object) -> httpx.Response:
        """Returns the response after the request has ended completely."""
        before = self.in_flight.inside
        response = asgi(self.app, method, path, **request)
        assert (self.in_flight.inside, self.backend.open) == (before, 0)
        return response

    def counted(self, task: str, code: int) -> float | None:
        """Returns the number of responses with this code in the gateway's metrics."""
        labels = {"task": task, "code": str(code)}
        return self.registry.get_sample_value("tasc_http_requests_total", labels)


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    """Returns the error of a response, which must have the status and OpenAI's format."""
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["message"]
    kind = "invalid_request_error" if status < 500 else "server_error"
    assert content["error"]["type"] == kind
    return content["error"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the content of each event of a stream; only the last may be the end mark."""
    *lines, last, after = response.text.split("\n\n")
    assert (last, after) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]
