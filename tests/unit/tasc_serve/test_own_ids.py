"""Calls that are made in one HTTP request do not stand in each other's way in Serve's router."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.serve.context import (
    _get_serve_request_context,
    _RequestContext,
    _serve_request_context,
)

from tasc_serve.calls import Call
from tasc_serve.line import HandleLine
from tasc_serve.routing import ChosenReplicaRouter


class Handle:
    """A handle that notes under which request's id it is called."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.complete = self.pulse = SimpleNamespace(remote=self._remote)

    def options(self, *, stream: bool) -> "Handle":
        return self

    def _remote(self, asked: object) -> Any:
        self.ids.append(_get_serve_request_context()._internal_request_id)

        future = asyncio.get_running_loop().create_future()
        future.set_result("answer")
        return future


def test_a_call_has_no_id_of_the_request_it_is_made_in_and_the_request_keeps_its_own() -> None:
    async def run() -> list[str]:
        handle = Handle()
        line = HandleLine(handle)  # type: ignore[arg-type]
        _serve_request_context.set(_RequestContext(request_id="r", _internal_request_id="one"))
        await line.complete(Call("a", "hi", False))
        await line.pulse("replica")
        assert _get_serve_request_context()._internal_request_id == "one"
        assert _get_serve_request_context().request_id == "r"
        return handle.ids

    assert asyncio.run(run()) == ["", ""]


def test_serve_pauses_before_it_tries_a_call_again() -> None:
    waiting = SimpleNamespace(args=[], routing_context=SimpleNamespace(should_backoff=False))
    choose: Any = ChosenReplicaRouter.choose_replicas
    asyncio.run(choose(None, [], waiting))
    assert waiting.routing_context.should_backoff
