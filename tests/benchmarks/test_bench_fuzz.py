"""The fuzz run as its users run it, on a few hundred requests; and what it must not overlook."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fuzz_attacks import Attacks, Surface
from fuzz_bodies import Endpoint
from fuzz_run import Tally
from fuzz_wire import Attack, Outcome, play

BENCHMARK = Path(__file__).with_name("bench_fuzz.py")
SCHEMA = {
    "properties": {
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/s"}}]},
        "n": {"type": "integer", "minimum": 1},
    },
    "required": ["model", "prompt"],
    "$defs": {"s": {"type": "string", "maxLength": 5}},
}
SURFACE = Surface(
    [("GET", "/healthz"), ("GET", "/v1/models/{task}")],
    [Endpoint("/v1/completions", SCHEMA)], ["greet"], None, 1 << 16,
)  # fmt: skip
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.ray
@pytest.mark.redis
def test_a_few_hundred_attacks_leave_the_service_as_it_was() -> None:
    command = [sys.executable, str(BENCHMARK), "--requests", "400", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["requests"] == 400
    assert [found[bad] for bad in ("internal_errors", "hangs", "dead")] == [0, 0, 0]
    assert {"200", "400", "401", "404"} <= set(found["by_status"])
    assert len(found["by_kind"]) >= 8
    assert {who.rsplit(" ", 1)[0] for who in found["grown"]} >= {"gateway", "replica of alpha"}


def first(count: int, seed: int) -> list[Attack]:
    attacks = Attacks(SURFACE, random.Random(seed))
    return [attacks.next() for _ in range(count)]


def test_the_same_seed_makes_the_same_attacks_and_another_others() -> None:
    assert first(200, 1) == first(200, 1) != first(200, 2)


def test_many_bodies_are_good_and_many_are_not() -> None:
    good = 0
    bodies = [a for a in first(1000, 1) if a.kind == "body"]
    for attack in bodies:
        head, _, body = attack.steps[0].partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        try:
            content = json.loads(body)
            good += isinstance(content, dict) and {"model", "prompt"} <= set(content)
        except (ValueError, RecursionError):
            continue
    assert len(bodies) > 400
    assert 0.3 < good / len(bodies) < 0.95


def played(handler: Handler, attack: Attack, deadline_s: float = 20.0) -> Outcome:
    """What comes of an attack on a server that does as told."""

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


def tallied(handler: Handler, attack: Attack, deadline_s: float = 20.0) -> Tally:
    tally = Tally()
    tally.add(attack, played(handler, attack, deadline_s))
    return tally


GET = Attack("route", [REQUEST], answered=True)


def test_all_answers_on_a_connection_are_counted() -> None:
    tally = tallied(answering(b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 404 No\r\n\r\n"), GET)
    assert tally.by_status == {"200": 1, "404": 1}
    assert (tally.internal_errors, tally.hangs, tally.unanswered) == (0, 0, 0)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Internal Server Error\r\n\r\n",
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"message":"internal error; it is in',
    ],
)
def test_an_internal_error_is_seen_in_the_status_and_in_a_stream(answer: bytes) -> None:
    tally = tallied(answering(answer), GET)
    assert tally.internal_errors == 1
    assert "/" in tally.examples[0]


def test_a_request_without_an_answer_is_seen() -> None:
    assert tallied(answering(b""), GET).unanswered == 1


def test_a_hang_is_seen_and_a_client_that_leaves_is_none() -> None:
    assert tallied(never, GET, 0.2).hangs == 1
    assert tallied(never, Attack("slow", [REQUEST, 0.01], leave_s=0.01)).hangs == 0


def test_nobody_at_the_port_is_seen() -> None:
    tally = Tally()
    tally.add(GET, asyncio.run(play("127.0.0.1", 1, GET, 5)))
    assert tally.refused == 1


def test_a_service_of_nobody_is_told_in_one_line() -> None:
    command = [sys.executable, str(BENCHMARK), "--base", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "refused" in done.stderr.splitlines()[-1]
