"""Tests requests that never reach Ray Serve's HTTP server, and the few imports for that."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from support import asgi
from tasc_serve.http import proxy_guard
from tasc_serve.http.proxy_guard import OwnErrors, PlainHeaders, Shortcut, answer_directly
from tasc_serve.http.ray_proxy import CALLBACK


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(Request(scope).headers)
    await JSONResponse(headers)(scope, receive, send)


def answered(*headers: tuple[bytes, bytes]) -> httpx.Response:
    return asgi(PlainHeaders(echo), "GET", "/", headers=list(headers))


@pytest.mark.parametrize("name", [b"X-Request-ID", b"traceparent", b"Anything"])
def test_header_that_is_not_text_is_refused_and_named(name: bytes) -> None:
    response = answered((name, b"\xff\xfe"))
    assert response.status_code == 400
    assert name.decode().lower() in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    [b"x-request-timeout-seconds", b"X-Request-Disconnect-Disabled", b"serve_multiplexed_model_id",
     b"Serve-Multiplexed-Model-Id", b"x-session-id"],
)  # fmt: skip
def test_client_headers_cannot_control_serve(name: bytes) -> None:
    response = answered((name, b"?1"), (b"x-request-id", "é".encode()), (b"Accept", b"a/b"))
    assert response.status_code == 200
    seen = {key.replace("-", "_") for key in response.json()}
    assert name.decode().lower().replace("-", "_") not in seen
    assert {"x_request_id", "accept"} <= seen


def test_middleware_passes_scopes_other_than_http() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    asyncio.run(PlainHeaders(app)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == [{"type": "lifespan"}]


def test_import_path_of_the_middlewares_is_valid_for_serve() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    found = validate_http_proxy_callback_return(call_function_from_import_path(CALLBACK))
    assert [m.cls for m in found] == [m.cls for m in proxy_guard.middlewares()] == [
        PlainHeaders, OwnErrors, Shortcut
    ]  # fmt: skip


class Generating:
    """Answers ``/direct`` itself, with the received headers."""

    def is_direct(self, scope: Scope) -> bool:
        return bool(scope["path"] == "/direct")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"direct": True})(scope, receive, send)


def test_generating_requests_bypass_serve_and_keep_their_id(monkeypatch) -> None:
    def asked(path: str, **headers: str) -> httpx.Response:
        return asgi(Shortcut(echo), "POST", path, headers=headers)

    assert "direct" not in asked("/direct").json()  # no gateway is in this process
    monkeypatch.setattr(proxy_guard, "_direct", [])
    answer_directly(Generating())
    assert "direct" not in asked("/other").json()
    found = asked("/direct", **{"X-Request-ID": "mine"})
    assert (found.json(), found.headers["x-request-id"]) == ({"direct": True}, "mine")
    made = {asked("/direct").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


def errors_of(status: int, body: bytes, kind: bytes) -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"Content-Type", kind), (b"Content-Length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": body[9:], "more_body": False})

    return asgi(OwnErrors(app), "POST", "/v1/completions")


@pytest.mark.parametrize("status", [404, 500, 502, 503])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"Internal Server Error", b"text/plain"),
        (b'"Internal error"', b"application/json"),
        (b"Path '/v1/completions' not found", b"text/plain"),
    ],
)
def test_serve_error_of_a_dead_gateway_has_openai_format(status, body, kind) -> None:
    response = errors_of(status, body, kind)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "gateway_gone"


@pytest.mark.parametrize(
    ("status", "kind"), [(500, b"application/json"), (404, b"text/plain"), (200, b"text/plain")]
)
def test_answers_and_errors_of_a_gateway_pass_unchanged(status: int, kind: bytes) -> None:
    body = b'{"error": {"message": "of ours"}}'
    response = errors_of(status, body, kind)
    assert (response.status_code, response.content) == (status, body)


@pytest.mark.parametrize(("begun", "raises"), [(False, True), (True, True), (False, False)])
def test_dead_gateway_gives_503_unless_a_stream_has_begun(begun: bool, raises: bool) -> None:
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if raises:
            raise RuntimeError("the replica died")

    async def send(message: Any) -> None:
        sent.append(message)

    async def once() -> None:
        await OwnErrors(app)({"type": "http"}, None, send)  # type: ignore[arg-type]

    if begun:
        with pytest.raises(RuntimeError):
            asyncio.run(once())
        assert [message.get("status") for message in sent] == [200]
    else:
        asyncio.run(once())
        assert [message.get("status") for message in sent] == [503, None]
