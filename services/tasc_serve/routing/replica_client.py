"""Calls to replicas over Ray Serve handles, and which exceptions mean that a replica is lost."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from contextvars import Context
from typing import Any

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RaySystemError,
    TaskCancelledError,
)
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle

from tasc_runtime.errors import EngineBroken
from tasc_runtime.protocol import Answer, Call, Piece, Pulse, PulseRequest, Refusal

_DIED = (
    RayActorError,
    NodeDiedError,
    ObjectLostError,
    RaySystemError,
    # Of a replica that is being stopped; what we cancel ourselves does not come back as this.
    TaskCancelledError,
    RequestCancelledError,
)


def loss_reason(error: BaseException) -> str | None:
    """``broken``: its engine ended; ``died``: the process or its node; None: neither."""
    if isinstance(error, EngineBroken):
        return "broken"
    return "died" if isinstance(error, _DIED) else None


class ReplicaClient:
    """One task's replicas, behind the handle of their deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def complete(self, call: Call) -> Answer | Refusal:
        return await _awaited(_sent(self._handle.complete, call))

    async def stream(self, call: Call) -> AsyncGenerator[Piece | Refusal, None]:
        response = _sent(self._streaming.stream, call)
        try:
            async for item in response:
                yield item
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise

    async def wake(self) -> None:
        """Have Serve tell this process who is there, which a handle's first call begins."""
        with suppress(Exception):  # whatever is answered
            await self.pulse("")

    async def pulse(self, replica: str) -> Pulse:
        return await _awaited(_sent(self._handle.pulse, PulseRequest(replica)))


def _sent(method: Any, argument: Call | PulseRequest) -> Any:
    """The response to a call with an id of its own, not that of the HTTP request it is made in.

    Serve's router finds a waiting call by its id: of two with one id (the choices of a request,
    pulses) it never places the second, and tries without a pause, so that no other is placed.
    """
    return Context().run(method.remote, argument)


async def _awaited(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
