"""Middleware of Ray Serve's HTTP servers: a shortcut past Serve, and a guard around it.

Behind HAProxy each gateway's process has an HTTP server of its own. There, generating requests go
straight to our application: Serve's bookkeeping of a request costs more processor time than ours.
Other requests pass through Serve. It reads some headers before any code of ours: it fails on values
that are not UTF-8, and lets clients switch off what frees a row when they leave.
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names `middlewares` on every node. Nothing heavy is
imported, since proxies hold no models.
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
# As Serve compares them, with underscores for hyphens.
_STEERING: Final = frozenset(
    {
        b"x_request_timeout_seconds",
        b"x_request_disconnect_disabled",
        b"serve_multiplexed_model_id",
        b"x_session_id",
        ARRIVAL.replace("-", "_").encode(),  # HAProxy's: its requests do not come here
    }
)
_REQUEST_ID: Final = b"x-request-id"


class DirectApp(Protocol):
    """The application of a gateway."""

    def is_direct(self, scope: Scope) -> bool:
        """Whether it answers a request without Serve."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


_direct: list[DirectApp] = []  # one at most


def answer_directly(app: DirectApp) -> None:
    """Have this process's HTTP server give requests to an application without Serve."""
    _direct[:] = [app]


def middlewares() -> list[Middleware]:
    """What Serve puts in front of its HTTP servers, the innermost first."""
    return [Middleware(PlainHeaders), Middleware(OwnErrors), Middleware(Shortcut)]


class Shortcut:
    """Gives requests to the application that `answer_directly` names, and others to Serve.

    Serve does not count them. Its HTTP server does: a gateway that is replaced ends only when they
    have been answered.
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
    """The headers of a request by name; of several with one name, the first."""
    return dict(reversed(scope["headers"]))


class PlainHeaders:
    """Answers requests with headers that are no text with 400, and drops those that steer Serve."""

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
    """Says in our shape what Serve says of a gateway that died with a request: to send it again.

    Serve's own words are a text, or a text as JSON; errors of the gateways are objects, and pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = replaced = False
        held: Message | None = None  # the start of an error, until it is seen whose it is

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
            if begun:  # a stream is cut, so that its client sees that it is not whole
                raise
            log.warning("a request ended with its gateway", exc_info=True)
        if not begun:
            await _gone()(scope, receive, send)


def _may_be_serves(status: int) -> bool:
    """404 is what it says of every path before the gateways are there, and after."""
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
    message = f"header {name.decode('latin-1')[:64]} is no UTF-8; send ASCII"
    kind = "invalid_request_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": None}}, 400
    )
