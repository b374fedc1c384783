"""A gateway's connections to the replicas of one task, and the calls on them.

A connection is requested over a Ray Serve handle, once for each replica (`tasc_serve.wire`). If the
connection breaks, all calls on it end with `ReplicaLost`. The next call or heartbeat requests a new
connection from Serve, and so it can only reach the process that Serve has under this name.
"""

import asyncio
import itertools
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from tasc_protocol import Output, Request
from tasc_runtime.errors import EngineBroken, ServiceError
from tasc_runtime.protocol import Refusal, ReplicaState
from tasc_serve import wire
from tasc_serve.routing.fleet import ReplicaLost, loss_reason
from tasc_serve.settings import ConnectionSettings
from tasc_serve.wire import AttachRequest, BufferFull, Connection, Endpoint, Message

log = logging.getLogger(__name__)
_BUSY = Refusal("full", "large requests wait to be sent to the replica; try again later")


class ReplicaClient:
    """The connections to one task's replicas. Belongs to one event loop.

    Args:
        attach: Sends an `AttachRequest` to the replica that it names. The result yields an
            `Endpoint`, and ends when the connection ends.
        node: Id of this gateway's Ray node.
    """

    def __init__(
        self,
        attach: Callable[[AttachRequest], AsyncIterable[Endpoint]],
        node: str,
        settings: ConnectionSettings,
    ) -> None:
        self._attach = attach
        self._node = node
        self._settings = settings
        self._links: dict[str, asyncio.Task[_ReplicaConnection]] = {}

    async def complete(self, replica: str, request: Request) -> Output | Refusal:
        """Returns the output with the whole answer. Cancelling this coroutine cancels the call."""
        connection = await self._connected(replica)
        try:
            item = await connection.ask(lambda number: wire.Submit(number, request))
        except BufferFull:
            return _BUSY
        assert isinstance(item, Output | Refusal)
        return item

    async def stream(
        self, replica: str, request: Request
    ) -> AsyncGenerator[Output | Refusal, None]:
        """Yields the outputs of the answer. Closing the generator cancels the call."""
        connection = await self._connected(replica)
        try:
            with connection.asking(lambda number: wire.Submit(number, request)) as items:
                while True:
                    item = await items.get()
                    if isinstance(item, Exception):
                        raise item
                    assert isinstance(item, Output | Refusal)
                    yield item
                    if isinstance(item, Refusal) or item.result:
                        return
        except BufferFull:
            yield _BUSY

    async def heartbeat(self, replica: str) -> ReplicaState:
        connection = await self._connected(replica)
        item = await connection.ask(wire.Heartbeat)
        assert isinstance(item, ReplicaState)
        return item

    async def wake(self) -> None:
        """Makes a first call, after which Serve reports the replicas to this process."""
        with suppress(Exception):  # the answer does not matter
            await anext(aiter(self._attach(AttachRequest(""))), None)

    def disconnect(self, replica: str, reason: str) -> None:
        """Ends the connection to a replica, so that Serve can stop the replica.

        Args:
            reason: Reason of the `ReplicaLost` that ends the calls on the connection.
        """
        if link := self._links.pop(replica, None):
            link.add_done_callback(partial(_end, reason))

    async def _connected(self, name: str) -> "_ReplicaConnection":
        """Returns the connection to a replica; the first caller opens it.

        Raises:
            ReplicaLost: The connection cannot be opened.
        """
        link = self._links.get(name)
        if link and link.done() and _is_open(link):
            return link.result()
        if link is None or link.done():
            link = self._links[name] = asyncio.create_task(self._connect(name))
        return await asyncio.shield(link)  # other calls may await the same task

    async def _connect(self, name: str) -> "_ReplicaConnection":
        attachment = self._attach(AttachRequest(name, self._node))
        connection = _ReplicaConnection(name, self._settings)
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                endpoint = await anext(aiter(attachment))
                connection.attachment = attachment
                await _open(connection, endpoint)
                await connection.greet(endpoint.token)
        except Exception as error:  # includes errors raised in the replica
            connection.close()
            log.warning("no connection to replica %s: %r", name, error)
            slow = isinstance(error, TimeoutError)
            reason = "silent" if slow else loss_reason(error) or "died"
            raise ReplicaLost(name, reason) from error
        return connection


class _ReplicaConnection(Connection):
    """The connection to one replica.

    Attributes:
        attachment: The handle call that Serve counts; it must live as long as the connection.
        reason: Reason of the `ReplicaLost` that its calls get when the connection ends.
    """

    attachment: AsyncIterable[Endpoint] | None = None
    reason = "died"

    def __init__(self, name: str, settings: ConnectionSettings) -> None:
        super().__init__(settings)
        self._name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[_Item], object]] = {}
        self._welcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def greet(self, token: bytes) -> None:
        """Sends the token, and checks that the wanted replica answers.

        Raises:
            ConnectionError: Another replica answers, or the connection has ended.
        """
        self.send(wire.Hello(token))
        found = await self._welcome
        if found != self._name:
            self.close()
            raise ConnectionError(f"this is replica {found}, not {self._name}")

    async def ask(self, message: "_Asked") -> "_Answer":
        """Sends a message that has one reply, and returns the reply.

        Raises:
            ReplicaLost: The connection has ended.
        """
        reply: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        number = self._begin(message, partial(_settle, reply))
        try:
            return await reply
        finally:
            self._end(number)

    @contextmanager
    def asking(self, message: "_Asked") -> Iterator["asyncio.Queue[_Item]"]:
        """Sends a message; the block reads the replies. The block's end cancels an unfinished call.

        Raises:
            ReplicaLost: The connection has ended.
        """
        items: asyncio.Queue[_Item] = asyncio.Queue()
        number = self._begin(message, items.put_nowait)
        try:
            yield items
        finally:
            self._end(number)

    def _begin(self, message: "_Asked", hand: Callable[["_Item"], object]) -> int:
        if not self.is_open:
            raise ReplicaLost(self._name, self.reason)
        number = next(self._numbers)
        self.send(message(number))
        self._waiting[number] = hand
        return number

    def _end(self, number: int) -> None:
        if self._waiting.pop(number, None) and self.is_open:
            self.send(wire.Cancel(number))

    def received(self, message: Message) -> None:
        item: _Item
        match message:
            case wire.Answered(number, output):
                item = output
            case wire.Refused(number, refusal):
                item = refusal
            case wire.HeartbeatReply(number, heartbeat):
                item = heartbeat
            case wire.Failed(number, kind, text):
                item = EngineBroken(text) if kind == "broken" else ServiceError(text)
            case wire.Welcome(replica_id) if not self._welcome.done():
                self._welcome.set_result(replica_id)
                return
            case _:
                self.close(f"the replica sent an unexpected {type(message).__name__}")
                return
        more_follow = isinstance(item, Output) and item.result is None
        hand = self._waiting.get(number) if more_follow else self._waiting.pop(number, None)
        if hand is not None:  # items of a cancelled call are dropped
            hand(item)

    def lost(self, why: str) -> None:
        self.attachment = None
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionError(why))
        waiting, self._waiting = self._waiting, {}
        for hand in waiting.values():
            hand(ReplicaLost(self._name, self.reason))


_Asked = Callable[[int], wire.Submit | wire.Heartbeat]
_Answer = Output | Refusal | ReplicaState
_Item = _Answer | Exception


def _settle(reply: asyncio.Future[_Answer], item: _Item) -> None:
    if reply.done():  # the call was cancelled
        return
    if isinstance(item, Exception):
        reply.set_exception(item)
    else:
        reply.set_result(item)


def _end(reason: str, link: asyncio.Task[_ReplicaConnection]) -> None:
    if _is_open(link):
        link.result().reason = reason
        link.result().close()


def _is_open(link: asyncio.Task[_ReplicaConnection]) -> bool:
    return not link.cancelled() and not link.exception() and link.result().is_open


async def _open(connection: Connection, endpoint: Endpoint) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(endpoint.address, str):
        await loop.create_unix_connection(lambda: connection, endpoint.address)
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # only the certificate that came over Ray's channel is trusted
    context.load_verify_locations(cadata=endpoint.certificate)
    host, port = endpoint.address
    await loop.create_connection(lambda: connection, host, port, ssl=context)
