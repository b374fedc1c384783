"""Tests what the fuzz benchmark detects."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.fuzz.bench_fuzz import Tally
from benchmarks.fuzz.wire import Attack, Outcome, play

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def played(handler: Handler, attack: Attack, deadline_s: float = 20.0) -> Outcome:
    """The outcome of an attack on a server with this handler."""

    async def run() -> Outcome:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await play("127.0.0.1", port, attack, deadline_s)

    return asyncio.run(run())


def answering(answer: bytes) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        await writer.drain()
        writer.close()

    return handle


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


GET = Attack("route", [REQUEST], answered=True)


OK, NOT_FOUND = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n"
INTERNAL = b"HTTP/1.1 500 Internal Server Error\r\n\r\n"
IN_STREAM = OK + b'data: {"error":{"message":"internal error; it is in'
LEFT = Attack("slow", [REQUEST, 0.01], leave_s=0.01)


@pytest.mark.parametrize(
    ("handler", "attack", "deadline_s", "by_status", "faults"),
    [
        (answering(OK + NOT_FOUND), GET, 300.0, {"200": 1, "404": 1}, {}),
        (answering(INTERNAL), GET, 300.0, {"500": 1}, {"internal_errors": 1}),
        (answering(IN_STREAM), GET, 300.0, {"200": 1}, {"internal_errors": 1}),
        (answering(b""), GET, 300.0, {"none": 1}, {"unanswered": 1}),
        (never, GET, 0.2, {"none": 1}, {"hangs": 1, "unanswered": 1}),
        (never, LEFT, 300.0, {"none": 1}, {}),
    ],
    ids=["answers", "internal", "in a stream", "unanswered", "hang", "client leaves"],
)
def test_outcomes_are_counted_and_faults_are_detected(
    handler: Handler,
    attack: Attack,
    deadline_s: float,
    by_status: dict[str, int],
    faults: dict[str, int],
) -> None:
    tally = Tally()
    shown = tally.add(attack, played(handler, attack, deadline_s))
    assert tally.by_status == by_status
    kinds = ("internal_errors", "hangs", "refused", "unanswered")
    assert {kind: n for kind in kinds if (n := getattr(tally, kind))} == faults
    assert tally.examples == shown
    assert len(shown) == len(faults)
