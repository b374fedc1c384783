"""In front of Ray Serve's HTTP servers: readable headers, none that steer Serve, and clean errors.

Serve looks at some headers before any code of ours: it fails on values that are no UTF-8, and lets
clients switch off what frees a row when they leave. ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``
names `middlewares` on every node. Nothing heavy is imported: proxies hold no models.
"""

import logging
from typing import Final

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)
CALLBACK: Final = "tasc_serve.proxy_guard.middlewares"
# As Serve compares them, with underscores for hyphens.
_STEERING: Final = frozenset(
    {
        b"x_request_timeout_seconds",
        b"x_request_disconnect_disabled",
        b"serve_multiplexed_model_id",
        b"x_session_id",
    }
)


def middlewares() -> list[Middleware]:
    """What Serve puts in front of its HTTP servers."""
    return [Middleware(PlainHeaders), Middleware(OwnErrors)]


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

    Errors of the gateways themselves are JSON, and pass.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = replaced = False

        async def sent(message: Message) -> None:
            nonlocal begun, replaced
            if message["type"] == "http.response.start" and _is_serves_own(message):
                begun = replaced = True
                await _gone()(scope, receive, send)
            elif not replaced:
                begun = True
                await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception:
            if begun:  # a stream is cut, so that its client sees that it is not whole
                raise
            log.warning("a request ended with its gateway", exc_info=True)
            await _gone()(scope, receive, send)


def _is_serves_own(start: Message) -> bool:
    types = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    return start["status"] >= 500 and not any(b"json" in value for value in types)


def _gone() -> JSONResponse:
    message = "the gateway that had this request ended before it was answered; send it again"
    error = {"message": message, "type": "server_error", "param": None, "code": "gateway_gone"}
    return JSONResponse({"error": error}, 503, {"Retry-After": "1"})


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
