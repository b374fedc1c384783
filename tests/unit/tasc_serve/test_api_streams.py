"""A stream says the same as a whole answer, always ends properly, and never outlives its client."""

import asyncio
import json

import pytest
from fake_backend import FOREVER, GOOD, TASK, FakeBackend, Service, answer, events
from starlette.requests import ClientDisconnect

from tasc_runtime.protocol import Refusal
from tasc_serve.http_errors import ApiError

TEXTS = ("na", "", "ïve\n\n", "data: 東京 🙂")
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
def test_the_pieces_make_the_whole_answer(path):
    service = Service(FakeBackend(*answer(*TEXTS)))
    found = events(stream(service, path))
    assert [text_of(e) for e in found] == [t for t in TEXTS if t]
    assert [e["choices"][0]["finish_reason"] for e in found] == [None, None, "stop"]
    assert len({(e["id"], e["object"], e["model"]) for e in found}) == 1
    assert all("usage" not in e for e in found)
    assert service.counted(TASK, 200) == 1


@either_endpoint
def test_usage_comes_last_in_an_event_of_its_own_for_who_asks(path):
    service = Service(FakeBackend(*answer(*TEXTS)))
    *pieces, last = events(stream(service, path, stream_options={"include_usage": True}))
    assert "".join(map(text_of, pieces)) == "".join(TEXTS)
    assert [e["usage"] for e in pieces] == [None] * len(pieces)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}


@either_endpoint
def test_an_answer_without_text_still_says_how_it_ended(path):
    (only,) = events(stream(Service(FakeBackend(*answer("", ""))), path))
    assert (text_of(only), only["choices"][0]["finish_reason"]) == ("", "stop")


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
def test_a_stream_that_cannot_go_on_ends_with_an_error_and_the_end_mark(path, then, code):
    backend = FakeBackend(answer("one", "two")[0], then)
    service = Service(backend, request_timeout_s=0.2)
    piece, last = events(stream(service, path))
    assert text_of(piece) == "one"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error"
    assert "1234" not in last["error"]["message"]
    assert service.counted(TASK, code) == 1


class Client:
    """Speaks ASGI itself, since httpx's transport cannot hang up half-way."""

    def __init__(self, path, spec_version, n, stream=True, reads=True):
        body = json.dumps(GOOD[path] | {"stream": stream, "n": n}).encode()
        asgi = {"version": "3.0", "spec_version": spec_version}
        self.scope = {"type": "http", "asgi": asgi, "http_version": "1.1", "method": "POST"}
        self.scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
        self.scope |= {"root_path": "", "scheme": "http", "headers": []}
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]
        self.has_piece, self.is_gone = asyncio.Event(), asyncio.Event()
        self.reads = reads

    async def receive(self):
        if self._requests:
            return self._requests.pop()
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.is_gone.is_set():
            raise OSError("the connection is closed")
        if message.get("body"):
            self.has_piece.set()
            while not self.reads:
                await asyncio.sleep(1)


@either_endpoint
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "how", ["the server says so", "sending fails", "the server cancels", "it does not read"]
)
def test_a_client_that_goes_away_ends_the_work_for_it(path, how, n):
    first, last = answer("one", "two")
    backend = FakeBackend(first, last if how == "sending fails" else FOREVER)
    reads = how != "it does not read"
    service = Service(backend, request_timeout_s=60 if reads else 0.2)

    async def hang_up_after_the_first_piece():
        client = Client(path, "2.3" if how == "the server says so" else "2.4", n, reads=reads)
        if how == "sending fails":
            client.has_piece = client.is_gone
        serving = asyncio.ensure_future(service.app(client.scope, client.receive, client.send))
        await client.has_piece.wait()
        client.is_gone.set()
        if how == "the server cancels":
            serving.cancel()
        async with asyncio.timeout(30):
            (ended,) = await asyncio.gather(serving, return_exceptions=True)
        assert (len(backend.calls), backend.open) == (n, 0)
        return type(ended)

    kinds = {"sending fails": ClientDisconnect, "the server cancels": asyncio.CancelledError}
    assert asyncio.run(hang_up_after_the_first_piece()) is kinds.get(how, type(None))
    assert service.counted(TASK, 499) == 1


@either_endpoint
def test_a_stream_whose_first_event_was_never_sent_is_closed_and_counted(path):
    backend = FakeBackend(answer("one", "two")[0], FOREVER)
    service = Service(backend)

    async def hang_up_before_anything_is_sent():
        client = Client(path, "2.4", 1)
        client.is_gone.set()
        serving = service.app(client.scope, client.receive, client.send)
        await asyncio.gather(serving, return_exceptions=True)
        return backend.open

    assert asyncio.run(hang_up_before_anything_is_sent()) == 0
    assert service.counted(TASK, 499) == 1


@either_endpoint
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["the client goes away", "the server cancels"])
def test_a_whole_answer_that_nobody_waits_for_is_given_up_and_counted(path, how, n):
    backend = FakeBackend(FOREVER)
    service = Service(backend)

    async def cancel():
        client = Client(path, "2.4", n, stream=False)
        serving = asyncio.ensure_future(service.app(client.scope, client.receive, client.send))
        while backend.open < n:
            await asyncio.sleep(0)
        if how == "the server cancels":
            serving.cancel()
        client.is_gone.set()
        await asyncio.gather(serving, return_exceptions=True)
        return backend.open

    assert asyncio.run(cancel()) == 0
    assert service.counted(TASK, 499) == 1
