"""Tests that streams equal whole answers, always end properly, and end with their client."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from fake_backend import ADMITTED, FOREVER, GOOD, TASK, FakeBackend, Service, answer, events
from openai import APIError, InternalServerError, OpenAI
from starlette.requests import ClientDisconnect

from support import eventually, free_port
from tasc_runtime.protocol import Refusal
from tasc_serve.http_errors import ApiError

TEXTS = ("na", "", "ïve\n\n", "data: 東京 🙂")
COMMENT = ": keep-alive\n\n"
PAUSE_S, KEEP_ALIVE_S = 0.2, 0.05
either_endpoint = pytest.mark.parametrize("path", GOOD)


def stream(service, path, **more):
    response = service.ask("POST", path, json=GOOD[path] | {"stream": True} | more)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return response


def text_of(event):
    (choice,) = event["choices"]
    return choice["delta"]["content"] if "delta" in choice else choice["text"]


@either_endpoint
def test_streamed_pieces_add_up_to_the_whole_answer(path):
    service = Service(FakeBackend(*answer(*TEXTS)))
    found = events(stream(service, path))
    assert [text_of(e) for e in found] == [t for t in TEXTS if t]
    assert [e["choices"][0]["finish_reason"] for e in found] == [None, None, "stop"]
    assert len({(e["id"], e["object"], e["model"]) for e in found}) == 1
    assert all("usage" not in e for e in found)
    assert service.counted(TASK, 200) == 1


@either_endpoint
def test_usage_is_the_last_event_if_requested(path):
    service = Service(FakeBackend(*answer(*TEXTS)))
    *pieces, last = events(stream(service, path, stream_options={"include_usage": True}))
    assert "".join(map(text_of, pieces)) == "".join(TEXTS)
    assert [e["usage"] for e in pieces] == [None] * len(pieces)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


@either_endpoint
@pytest.mark.parametrize(
    ("then", "code"),
    [
        (FOREVER, 504),
        (Refusal("full", "too many"), 503),
        (ApiError(503, "the replica died"), 503),
        (RuntimeError("password is 1234"), 500),
    ],
    ids=str,
)
def test_failed_stream_ends_with_an_error_event_and_the_end_mark(path, then, code):
    backend = FakeBackend(answer("one", "two")[0], then)
    service = Service(backend, request_timeout_s=0.2)
    piece, last = events(stream(service, path))
    assert text_of(piece) == "one"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error"
    assert "1234" not in last["error"]["message"]
    assert service.counted(TASK, code) == 1


@either_endpoint
def test_streams_disable_buffering_by_proxies(path):
    response = stream(Service(FakeBackend(*answer("one"))), path)
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"


@either_endpoint
@pytest.mark.parametrize("script", [(ADMITTED, PAUSE_S), (PAUSE_S,)], ids=["queued", "no replica"])
def test_idle_stream_sends_comments_before_and_between_events(path, script):
    first, last = answer("one", "two")
    backend = FakeBackend(*script, first, PAUSE_S, last)
    response = stream(Service(backend, stream_keep_alive_s=KEEP_ALIVE_S), path)
    before, one, two, end = parts = response.text.split("data: ")
    assert before.replace(COMMENT, "") == ""
    assert [part.endswith(COMMENT) for part in parts] == [True, True, False, False]
    assert ("one" in one, "two" in two, end) == (True, True, "[DONE]\n\n")


@either_endpoint
@pytest.mark.parametrize("script", [(ADMITTED, PAUSE_S), (PAUSE_S,)], ids=["queued", "no replica"])
def test_refusal_is_a_status_before_the_stream_begins_and_an_event_afterwards(path, script):
    full = Refusal("full", "no place", None, 11.2)
    service = Service(FakeBackend(*script, full), stream_keep_alive_s=KEEP_ALIVE_S)
    late = stream(service, path).text.replace(COMMENT, "")
    assert (
        json.loads(late.split("\n\n")[0].removeprefix("data: "))["error"]["message"] == "no place"
    )
    assert service.counted(TASK, 503) == 1
    at_once = Service(FakeBackend(full)).ask("POST", path, json=GOOD[path] | {"stream": True})
    assert (at_once.status_code, at_once.headers["retry-after"]) == (503, "12")


class Client:
    """An ASGI client, because httpx's transport cannot disconnect half-way."""

    def __init__(self, path, spec_version, n, stream=True, reads=True):
        body = json.dumps(GOOD[path] | {"stream": stream, "n": n}).encode()
        asgi = {"version": "3.0", "spec_version": spec_version}
        self.scope = {"type": "http", "asgi": asgi, "http_version": "1.1", "method": "POST"}
        self.scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
        self.scope |= {"root_path": "", "scheme": "http", "headers": []}
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]
        self.has_head, self.has_piece, self.is_gone = (asyncio.Event() for _ in range(3))
        self.reads = reads

    async def receive(self):
        if self._requests:
            return self._requests.pop()
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.is_gone.is_set():
            raise OSError("the connection is closed")
        self.has_head.set()
        if message.get("body"):
            self.has_piece.set()
            while not self.reads:
                await asyncio.sleep(1)


def leave(service, client, until, cancels=False):
    """Serves a request whose client leaves after ``until``; returns the type of the outcome."""

    async def serve():
        serving = asyncio.ensure_future(service.app(client.scope, client.receive, client.send))
        await until()
        client.is_gone.set()
        if cancels:
            serving.cancel()
        async with asyncio.timeout(30):
            (ended,) = await asyncio.gather(serving, return_exceptions=True)
        return type(ended), service.backend.open

    ended, open_calls = asyncio.run(serve())
    assert (open_calls, service.counted(TASK, 499)) == (0, 1)
    return ended


@either_endpoint
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("the server says so", type(None)),
        ("sending fails", ClientDisconnect),
        ("the server cancels", asyncio.CancelledError),
        ("it does not read", type(None)),
    ],
)
def test_client_that_disconnects_during_a_stream_ends_its_calls(path, how, ends, n):
    first, last = answer("one", "two")
    backend = FakeBackend(first, last if how == "sending fails" else FOREVER)
    reads = how != "it does not read"
    service = Service(backend, request_timeout_s=60 if reads else 0.2)
    client = Client(path, "2.3" if how == "the server says so" else "2.4", n, reads=reads)
    if how == "sending fails":
        client.has_piece = client.is_gone
    cancels = how == "the server cancels"
    assert leave(service, client, client.has_piece.wait, cancels) is ends
    assert len(backend.calls) == n


@either_endpoint
def test_stream_whose_first_event_was_never_sent_is_closed_and_counted(path):
    client = Client(path, "2.4", 1)
    client.is_gone.set()
    leave(Service(FakeBackend(answer("one", "two")[0], FOREVER)), client, client.is_gone.wait)


@either_endpoint
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cancels", [False, True])
def test_client_that_disconnects_before_a_whole_answer_ends_its_calls(path, cancels, n):
    backend = FakeBackend(FOREVER)

    async def running():
        while backend.open < n:
            await asyncio.sleep(0)

    leave(Service(backend), Client(path, "2.4", n, stream=False), running, cancels)


@either_endpoint
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_queued_stream_has_its_headers_and_its_client_may_disconnect(path, n, spec_version):
    client = Client(path, spec_version, n)

    async def headers():
        await client.has_head.wait()
        assert not client.has_piece.is_set()

    service = Service(FakeBackend(ADMITTED, FOREVER), stream_keep_alive_s=KEEP_ALIVE_S)
    leave(service, client, headers)


@contextmanager
def listening(service):
    """Runs the service on its own port; yields OpenAI's client without retries."""
    server = uvicorn.Server(uvicorn.Config(service.app, port=free_port(), log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        base = f"http://127.0.0.1:{server.config.port}/v1"
        with OpenAI(base_url=base, api_key="none", max_retries=0) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def chat(client):
    events = client.chat.completions.create(**GOOD["/v1/chat/completions"], stream=True)
    return "".join(event.choices[0].delta.content or "" for event in events)


def completion(client):
    events = client.completions.create(model=TASK, prompt="hi", stream=True)
    return "".join(event.choices[0].text for event in events)


def response(client):
    events = client.responses.create(model=TASK, input="hi", stream=True)
    return "".join(getattr(event, "delta", "") for event in events)


def test_openai_client_skips_comments_and_raises_error_events():
    full = Refusal("full", "no place")
    backend = FakeBackend()
    with listening(Service(backend, stream_keep_alive_s=KEEP_ALIVE_S)) as client:
        for ask in (chat, completion, response):
            backend.script = (ADMITTED, PAUSE_S, *answer("one", "two"))
            assert ask(client) == "onetwo"
            backend.script = (ADMITTED, PAUSE_S, full)
            with pytest.raises(APIError, match="no place") as queued:
                ask(client)
            assert queued.value.code == "service_full"
            backend.script = (full,)
            with pytest.raises(InternalServerError, match="no place"):
                ask(client)
