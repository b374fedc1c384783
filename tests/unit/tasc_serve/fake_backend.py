"""A backend that plays a script, so that the HTTP surface can be tested without Ray and models."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tasc_engine import Delta, GenerationResult, Timings
from tasc_serve.api import create_api
from tasc_serve.calls import Call, Refusal, TaskStatus
from tasc_serve.settings import LimitSettings

FOREVER: Final = "wait for ever"
TASK: Final = "greet"
STATUS: Final = TaskStatus(TASK, 1, "model", None, "f" * 32, 512, 8, 3, 100, 4096)

Item = Delta | Refusal | Exception | str


class FakeBackend:
    """Plays the same script for every call; notes the calls and how many are still open."""

    tasks = (TASK,)

    def __init__(self, *script: Item, status: TaskStatus | Exception = STATUS) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.open = 0
        self._status = status

    async def complete(self, task: str, call: Call) -> GenerationResult | Refusal:
        async with aclosing(self.stream(task, call)) as items:
            async for item in items:
                if isinstance(item, Refusal):
                    return item
                if item.result:
                    return item.result
        raise AssertionError("the script has no end")

    async def stream(self, task: str, call: Call) -> AsyncGenerator[Delta | Refusal, None]:
        assert task == TASK
        self.calls.append(call)
        self.open += 1
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, str):
                    await asyncio.Event().wait()
                else:
                    yield item
        finally:
            self.open -= 1

    async def status(self, task: str) -> TaskStatus:
        if isinstance(self._status, Exception):
            raise self._status
        return replace(self._status, task=task)

    async def metrics(self) -> Sequence[str]:
        return ["# TYPE held gauge\nheld 1\n", "# TYPE held gauge\nheld 2\n"]

    def metrics_targets(self) -> Sequence[str]:
        return ["127.0.0.1:1", "127.0.0.1:2"]


def answer(*texts: str) -> list[Delta]:
    """The deltas of one answer of two tokens a piece."""
    whole = tuple(range(2 * len(texts)))
    result = GenerationResult(
        "id", whole, "".join(texts), "stop", prompt_tokens=5, timings=Timings(0.0, 0.0, 0.0)
    )
    deltas = [Delta("id", (2 * i, 2 * i + 1), text) for i, text in enumerate(texts)]
    return [*deltas[:-1], replace(deltas[-1], result=result)]


class Service:
    """The application over a backend, asked one request at a time."""

    def __init__(self, backend: FakeBackend, **limits: float) -> None:
        self.registry = CollectorRegistry()
        self.app: FastAPI = create_api(backend, LimitSettings(**limits), self.registry)

    def ask(self, method: str, path: str, **request: object) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **request)

        return asyncio.run(once())

    def counted(self, task: str, code: int) -> float | None:
        """How many answers with this code the gateway's metrics have."""
        labels = {"task": task, "code": str(code)}
        return self.registry.get_sample_value("tasc_http_requests_total", labels)


def error_of(response: httpx.Response, status: int) -> dict[str, str | None]:
    """The error of an answer, which must have the status and the OpenAI shape."""
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["message"]
    kind = "invalid_request_error" if status < 500 else "server_error"
    assert content["error"]["type"] == kind
    return content["error"]
