"""Middleware of Ray Serve's HTTP servers: a shortcut that bypasses Serve, and a guard.

Behind HAProxy, each gateway's process has its own HTTP server. In these servers, generating
requests go directly to the application, since Serve's own processing costs more than the
application's. Other requests pass through Serve, which reads some headers first. The guard refuses
header values that are not UTF-8, because Serve fails on them. It drops headers that control Serve,
because with some of them a client could disable the code that frees its row when it disconnects.

Serve imports `middlewares` by its path in the environment variable
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``, which is set on every node. This module imports no
model code, since proxies do not need any.
"""

import logging
import os
from collections.abc import Mapping
from typing import Final, Protocol

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasc_serve.http.ray_proxy import ARRIVAL, GONE

log = logging.getLogger(__name__)
_OURS: Final = b'{"error"'
# Headers that control Serve, as Serve spells them: with underscores instead of hyphens.
_STEERING: Final = frozenset(
    {
        b"x_request_timeout_seconds",
        b"x_request_disconnect_disabled",
        b"serve_multiplexed_model_id",
        b"x_session_id",
        ARRIVAL.replace("-", "_").encode(),  # trusted only in requests that bypass Serve
    }
)
_REQUEST_ID: Final = b"x-request-id"


class DirectApp(Protocol):
    """The application of a gateway."""

    def is_direct(self, scope: Scope) -> bool:
        """Whether the application answers a request without Serve."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


_direct: list[DirectApp] = []  # at most one


def answer_directly(app: DirectApp) -> None:
    """Makes this process's HTTP server pass requests to an application without Serve."""
    _direct[:] = [app]


def middlewares() -> list[Middleware]:
    """The middlewares that Serve adds to its HTTP servers, the innermost first."""
    return [Middleware(PlainHeaders), Middleware(OwnErrors), Middleware(Shortcut)]


class Shortcut:
    """Passes some requests to the application set by `answer_directly`, and others to Serve.

    Serve does not count the requests that bypass it, but its HTTP server does. A replaced gateway
    therefore ends only after these requests are answered.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (_direct and _direct[0].is_direct(scope)):
            await self._app(scope, receive, send)
            return
        request_id = first_fields(scope).get(_REQUEST_ID) or os.urandom(16).hex().encode()

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((_REQUEST_ID, request_id))
            await send(message)

        await _direct[0](scope, receive, sent)


def first_fields(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers of a request by name. If a name occurs repeatedly, the first header counts."""
    return dict(reversed(scope["headers"]))


class PlainHeaders:
    """Answers 400 if a header is not UTF-8, and drops headers that control Serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [
                (name, value)
                for name, value in scope["headers"]
                if name.lower().replace(b"-", b"_") not in _STEERING
            ]
            if fault := next((name for name, value in headers if not _is_text(value)), None):
                await _refusal(fault)(scope, receive, send)
                return
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


class OwnErrors:
    """Replaces Serve's own error responses by a 503 in the OpenAI shape.

    Serve answers a request itself if the gateway failed before it answered, or if there is no
    gateway. Serve's errors are plain text or a JSON string. A gateway's errors are JSON objects,
    which are not changed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = replaced = False
        held: Message | None = None  # the start of an error, until its body shows who sent it

        async def sent(message: Message) -> None:
            nonlocal begun, replaced, held
            if message["type"] == "http.response.start" and _may_be_serves(message["status"]):
                held = message
            elif held and not message.get("body", b"").startswith(_OURS):
                held, begun, replaced = None, True, True
                await _gone()(scope, receive, send)
            elif not replaced:
                begun = True
                if held:
                    await send(held)
                    held = None
                await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:
            if begun:  # cut the stream, so that the client sees that the answer is incomplete
                raise
            log.warning(
                "the gateway failed before it answered a request; the client gets status 503",
                exc_info=True,
            )
        if not begun:
            await _gone()(scope, receive, send)


def _may_be_serves(status: int) -> bool:
    """Whether a status may come from Serve, which returns 404 while there are no gateways."""
    return status >= 500 or status == 404


def _gone() -> JSONResponse:
    return JSONResponse(GONE, 503, {"Retry-After": "1"})


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refusal(name: bytes) -> JSONResponse:
    message = f"header {name.decode('latin-1')[:64]} is not UTF-8; send ASCII"
    kind = "invalid_request_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": None}}, 400
    )
