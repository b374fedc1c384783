"""The connection between gateway and replica: real sockets, scripted answers."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from fake_fleet import status
from msgspec import structs

from support import eventually_async, refused
from tasc_engine import Acceptance, GenerationResult, Timings
from tasc_protocol import GuideSpec, Output, Request, TokenText
from tasc_runtime.errors import EngineBroken, ServiceError
from tasc_runtime.protocol import Refusal, ReplicaState
from tasc_serve.replica.server import CallServer, socket_folder
from tasc_serve.routing.fleet import ReplicaLost
from tasc_serve.routing.replica_client import ReplicaClient
from tasc_serve.settings import ConnectionSettings
from tasc_serve.wire import AttachRequest, BufferFull, Connection, Endpoint, Hello, Message, Submit

pytestmark = pytest.mark.anyio
RESULT = GenerationResult(
    "a", (5, 2**40), "ü\0", "stop", 3, Timings(0.25, 0.5, 1.0), Acceptance((7, 0), (3, 0))
)
TOKENS = (TokenText(b"\xc3", float("-inf"), 0, ((b"\xff", -1.5),)),)
ANSWER = Output("a", result=RESULT, token_texts=TOKENS)
OUTPUTS = [
    Output("a", (5,), "a", token_texts=TOKENS, record_version=4),
    Output("a", (2**40,), "", RESULT, record_version=4),
]
STATE = ReplicaState(status(), 3, 0.5)
GUIDE = GuideSpec("choice", ("a", "b"), field="guided_choice")
CALL = Request(
    "c",
    "ü\0",
    9,
    ("stop",),
    templated=True,
    parameters={"temperature": 0.5, "top_k": 3},
    logit_bias=((3, -100.0),),
    seed=2**64 - 1,
    guide=GUIDE,
    logprobs=2,
    committed_ids=(1,),
)


@dataclass
class Replica:
    """Answers as the prompt requires, and records the calls and the cancelled ones."""

    calls: list[Request] = field(default_factory=list)
    open: int = 0
    broken: bool = False
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, call: Request, send: Callable[[Output | Refusal], None]) -> None:
        self.calls.append(call)
        self.open += 1
        try:
            match call.prompt:
                case "full":
                    return send(Refusal("full", "later", retry_after_s=2.0))
                case "break":
                    raise EngineBroken("out of memory")
                case "fail":
                    raise KeyError("an unexpected error")
            if call.stream:
                send(OUTPUTS[0])
            if call.prompt == "wait":
                await self.go_on.wait()
            if call.prompt == "late":
                return send(Refusal("late", "over"))
            if call.stream:
                return send(OUTPUTS[1])
            send(structs.replace(ANSWER, result=structs.replace(RESULT, id=call.id)))
        finally:
            self.open -= 1

    def state(self) -> ReplicaState:
        if self.broken:
            raise EngineBroken("out of memory")
        return STATE


@dataclass
class Serve:
    """Stands in for Ray Serve: it passes an attach request to the replica of that name.

    Attributes:
        attached: Handle calls that are open.
        endpoints: All returned endpoints.
        tampered: Changes an endpoint before it is returned.
    """

    servers: dict[str, CallServer]
    attached: int = 0
    endpoints: list[Endpoint] = field(default_factory=list)
    tampered: Callable[[Endpoint], Endpoint] = lambda endpoint: endpoint

    async def attach(self, request: AttachRequest) -> AsyncIterator[Endpoint]:
        self.attached += 1
        try:
            async for endpoint in self.servers[request.replica_id].attach(request.node):
                self.endpoints.append(endpoint)
                yield self.tampered(endpoint)
        finally:
            self.attached -= 1


class Attached:
    """A handle call; its items are produced even if they are not read."""

    def __init__(self, items: AsyncIterator[Endpoint]) -> None:
        self._items: asyncio.Queue[Endpoint | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(items))

    async def _run(self, items: AsyncIterator[Endpoint]) -> None:
        try:
            async for item in items:
                self._items.put_nowait(item)
        except ServiceError:
            pass
        self._items.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Endpoint]:
        while (item := await self._items.get()) is not None:
            yield item


@dataclass
class Both:
    replica: Replica
    server: CallServer
    serve: Serve
    client: ReplicaClient


@asynccontextmanager
async def connected(node: str = "here", **limits: Any) -> AsyncIterator[Both]:
    """Connects a gateway to a replica ``one``, by TLS if its ``node`` is not ``here``."""
    settings = ConnectionSettings(**limits)
    replica = Replica()
    server = CallServer(replica, "one", "127.0.0.1", "here", settings)
    serve = Serve({"one": server})
    client = ReplicaClient(lambda request: Attached(serve.attach(request)), node, settings)
    try:
        async with asyncio.timeout(60):
            yield Both(replica, server, serve, client)
    finally:
        server.close()


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with connected() as both:
        yield both


async def pieces(both: Both, call: Request) -> list[Output | Refusal]:
    async with aclosing(both.client.stream("one", structs.replace(call, stream=True))) as found:
        return [piece async for piece in found]


async def reply_to(endpoint: Endpoint, sent: bytes) -> bytes:
    """Sends bytes to a replica; returns its bytes up to the end of the connection."""
    reader, writer = await asyncio.open_unix_connection(str(endpoint.address))
    writer.write(sent)
    received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize("node", ["here", "elsewhere"])
async def test_all_messages_arrive_unchanged_on_one_connection(node: str) -> None:
    async with connected(node) as both:
        assert await both.client.complete("one", CALL) == structs.replace(
            ANSWER, result=structs.replace(RESULT, id="c")
        )
        assert both.replica.calls == [CALL]
        assert await pieces(both, CALL) == OUTPUTS
        assert await pieces(both, structs.replace(CALL, prompt="late")) == [
            OUTPUTS[0],
            Refusal("late", "over"),
        ]
        full = await both.client.complete("one", structs.replace(CALL, prompt="full"))
        assert full == Refusal("full", "later", retry_after_s=2.0)
        assert await both.client.heartbeat("one") == STATE
        assert len(both.serve.endpoints) == 1
        assert isinstance(both.serve.endpoints[0].address, str) == (node == "here")


async def test_concurrent_calls_get_their_own_answers(both: Both) -> None:
    calls = [structs.replace(CALL, id=str(i)) for i in range(500)]
    answers = await asyncio.gather(*(both.client.complete("one", call) for call in calls))
    assert [a.result.id for a in answers if isinstance(a, Output)] == [c.id for c in calls]
    assert len(both.serve.endpoints) == 1


async def test_cancelled_calls_end_at_the_replica_and_other_calls_continue(both: Both) -> None:
    waiting = structs.replace(CALL, prompt="wait")
    stays = asyncio.create_task(both.client.complete("one", waiting))
    goes = asyncio.create_task(both.client.complete("one", waiting))
    await eventually_async(lambda: both.replica.open == 2)
    goes.cancel()
    await eventually_async(lambda: both.replica.open == 1)
    async with aclosing(both.client.stream("one", structs.replace(waiting, stream=True))) as found:
        await anext(found)
        assert both.replica.open == 2
    await eventually_async(lambda: both.replica.open == 1)
    both.replica.go_on.set()
    assert isinstance(await stays, Output)


async def test_lost_connection_ends_calls_in_gateway_and_replica_and_is_replaced(both):
    waiting = structs.replace(CALL, prompt="wait")
    lost = [asyncio.create_task(both.client.complete("one", waiting)) for _ in range(3)]
    stream = both.client.stream("one", structs.replace(waiting, stream=True))
    await anext(stream)
    await eventually_async(lambda: both.replica.open == 4)
    both.client.disconnect("one", "silent")
    for task in (*lost, anext(stream)):
        with refused(ReplicaLost, "one", "silent"):
            await task
    await eventually_async(lambda: both.replica.open == 0 and both.serve.attached == 0)
    assert isinstance(await both.client.complete("one", CALL), Output)
    assert len({endpoint.token for endpoint in both.serve.endpoints}) == 2
    assert both.serve.attached == 1


async def test_connection_dropped_during_its_handshake_ends(both: Both) -> None:
    made = asyncio.create_task(both.client.heartbeat("one"))
    await eventually_async(lambda: both.serve.attached == 1)
    both.client.disconnect("one", "died")
    (found,) = await asyncio.gather(made, return_exceptions=True)
    assert found == STATE or isinstance(found, ReplicaLost)  # whichever came first
    await eventually_async(lambda: both.serve.attached == 0)
    assert await both.client.heartbeat("one") == STATE
    assert both.serve.attached == 1


async def test_broken_engine_and_unexpected_error_are_distinguished(both):
    with refused(EngineBroken, "out of memory"):
        await both.client.complete("one", structs.replace(CALL, prompt="break"))
    with refused(ServiceError, "an unexpected error"):
        await both.client.complete("one", structs.replace(CALL, prompt="fail"))
    both.replica.broken = True
    with refused(EngineBroken, "out of memory"):
        await both.client.heartbeat("one")
    assert isinstance(await both.client.complete("one", CALL), Output)


async def test_connection_token_works_once_and_expires() -> None:
    async with connected(connect_timeout_s=0.2) as both:
        await both.client.heartbeat("one")
        (used,) = both.serve.endpoints
        other = Serve(both.serve.servers, tampered=lambda e: replace(e, token=used.token))
        thief = ReplicaClient(
            lambda request: Attached(other.attach(request)), "here", ConnectionSettings()
        )
        with refused(ReplicaLost, "one"):
            await thief.heartbeat("one")
        await eventually_async(lambda: other.attached == 0)  # no connection had its token
        assert await reply_to(used, b"") == b""  # a silent connection is closed
        assert await both.client.heartbeat("one") == STATE


async def test_another_replica_at_the_address_is_refused(both):
    both.serve.servers["two"] = both.server
    with refused(ReplicaLost, "two"):
        await both.client.heartbeat("two")


async def test_another_certificate_is_not_trusted() -> None:
    async with connected("elsewhere") as both, connected("elsewhere") as others:
        await others.client.heartbeat("one")
        (foreign,) = others.serve.endpoints
        both.serve.tampered = lambda e: replace(e, certificate=foreign.certificate)
        with refused(ReplicaLost, "one") as caught:
            await both.client.heartbeat("one")
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)


@pytest.mark.parametrize(
    "sent", [b"\xff" * 64, b"\x03\0\0\0\x93\xc0\xc0", b"\x01\0\0\0\xc0", b"GET / HTTP/1.1\r\n\r\n"]
)
async def test_connection_with_invalid_data_is_closed_and_other_connections_continue(both, sent):
    await both.client.heartbeat("one")
    assert await reply_to(both.serve.endpoints[0], sent) == b""
    assert await both.client.heartbeat("one") == STATE


async def test_message_over_the_limit_is_refused_and_other_calls_continue() -> None:
    async with connected(max_message_bytes=65_536) as both:
        with refused(ValueError, "65536", "connection.max_message_bytes"):
            await both.client.complete("one", structs.replace(CALL, prompt="x" * 65_536))
        assert isinstance(await both.client.complete("one", CALL), Output)


async def test_calls_beyond_the_buffer_are_refused_and_other_calls_continue() -> None:
    async with connected(max_message_bytes=65_536) as both:
        other = asyncio.create_task(
            both.client.complete("one", structs.replace(CALL, prompt="wait"))
        )
        await eventually_async(lambda: both.replica.open == 1)
        large = structs.replace(CALL, prompt="x" * 50_000)
        found = await asyncio.gather(*(both.client.complete("one", large) for _ in range(8)))
        refused_ = [item for item in found if isinstance(item, Refusal)]
        assert {item.kind for item in refused_} == {"full"}
        assert len(refused_) < len(found)
        stream = both.client.stream("one", large)
        assert isinstance(await anext(stream), Output)
        both.replica.go_on.set()
        assert isinstance(await other, Output)
        assert both.serve.attached == 1


class Deaf(Connection):
    """A gateway that sends and never reads."""

    ended = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()

    def received(self, message: Message) -> None:
        raise AssertionError("it does not read")

    def lost(self, why: str) -> None:
        self.ended = why


async def test_bytes_held_by_the_transport_count_as_unsent() -> None:
    def held() -> int:
        return sum(len(call.args[0]) for call in transport.write.call_args_list)

    transport = Mock(asyncio.Transport)  # it sends nothing
    transport.get_write_buffer_size.side_effect = held
    transport.is_closing.side_effect = lambda: transport.abort.called
    side = Deaf(ConnectionSettings(max_message_bytes=65_536))
    side.connection_made(transport)
    for _ in range(2):
        side.send(Hello(b"x" * 60_000))
    await eventually_async(lambda: held() > 120_000)
    with pytest.raises(BufferFull):
        side.send(Submit(0, CALL))
    assert side.is_open
    side.send(Hello(b"x" * 60_000))
    assert not side.is_open


async def test_gateway_that_does_not_read_is_disconnected() -> None:
    async with connected(max_message_bytes=65_536) as both:
        deaf = Deaf(ConnectionSettings())
        endpoint = await anext(aiter(Attached(both.server.attach("here"))))
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: deaf, str(endpoint.address))
        deaf.send(Hello(endpoint.token))
        call = structs.replace(CALL, id="x" * 1000)  # its answer has the id, too
        for number in range(3000):
            deaf.send(Submit(number, call))
        await eventually_async(lambda: not deaf.is_open or deaf.ended)
        assert 0 < len(both.replica.calls) < 3000
        assert await both.client.heartbeat("one") == STATE


def test_sockets_are_private_and_sockets_of_dead_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = socket_folder()
    for name in (f"{dead.pid}-a", f"{os.getpid()}-b"):
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / name))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in socket_folder().iterdir()] == [f"{os.getpid()}-b"]
    folder.chmod(0o755)
    with refused(ServiceError, str(folder), "755", "TMPDIR"):
        socket_folder()


@pytest.mark.parametrize(("name", "mode"), [("x" * 100, 0o700), ("x", 0o755)])
async def test_gateways_on_the_same_node_use_tls_without_a_unix_socket(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    (tmp_path / name / f"tasc-{os.geteuid()}").mkdir(parents=True)
    (tmp_path / name / f"tasc-{os.geteuid()}").chmod(mode)
    assert await both.client.heartbeat("one") == STATE
    assert isinstance(both.serve.endpoints[0].address, tuple)
