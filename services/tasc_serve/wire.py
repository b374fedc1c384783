"""Messages between gateway and replica, and the connection that carries them.

A gateway has one connection to each replica. A message is sent as its length, followed by its
msgpack encoding. All messages of one iteration of the event loop are written together. Decoding is
typed, without pickle.
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

import msgspec

from tasc_protocol import Output, Request
from tasc_runtime.protocol import Refusal, ReplicaState
from tasc_serve.settings import ConnectionSettings

_LENGTH: Final = 4  # bytes, little-endian
# In seconds, except TCP_KEEPCNT (a count) and TCP_USER_TIMEOUT (milliseconds).
_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPALIVE": 10,  # the name on macOS
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}


@dataclass(frozen=True)
class AttachRequest:
    """Requests an endpoint from a replica. Only this message is sent over a Ray Serve handle.

    Attributes:
        replica_id: Id of the replica; empty: any replica receives the request, and none answers
            with an endpoint.
        node: Id of the gateway's Ray node. For a replica on the same node, the endpoint is a Unix
            socket.
    """

    replica_id: str
    node: str = ""


@dataclass(frozen=True)
class Endpoint:
    """The address at which a replica accepts one connection, and the credentials of both sides.

    Attributes:
        address: Path of a Unix socket, or host and port.
        token: One-time token that the gateway sends; valid for one connection.
        certificate: PEM of the only trusted certificate; None on a Unix socket.
    """

    address: str | tuple[str, int]
    token: bytes
    certificate: str | None = None


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first message of a gateway."""

    token: bytes


class Submit(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Requests an answer; ``number`` is its id on this connection."""

    number: int
    request: Request


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Cancels an answer."""

    number: int


class Heartbeat(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Requests the replica's state."""

    number: int


class Welcome(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The first message of a replica."""

    replica_id: str


class Answered(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """A part of an answer, or the whole answer; the last part has the result."""

    number: int
    output: Output


class Refused(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """The refusal or failure of a call."""

    number: int
    refusal: Refusal


class HeartbeatReply(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The replica's state."""

    number: int
    state: ReplicaState


class Failed(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """The replica's engine is broken, or an unexpected error occurred."""

    number: int
    kind: Literal["broken", "unexpected"]
    message: str


ToReplica: TypeAlias = Hello | Submit | Cancel | Heartbeat
ToGateway: TypeAlias = Welcome | Answered | Refused | HeartbeatReply | Failed
Message: TypeAlias = ToReplica | ToGateway

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class BufferFull(Exception):
    """Too many bytes already wait to be sent to a peer, so it gets no further calls."""


class Connection(asyncio.Protocol, ABC):
    """One side of a connection. Disconnects a peer that exceeds one of the limits.

    Attributes:
        most_received: Maximum bytes of a message from the peer.
    """

    def __init__(self, limits: ConnectionSettings) -> None:
        self._limits = limits
        self.most_received = limits.max_message_bytes
        self._buffer = bytearray()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._paused = self._flushing = False
        self._why = "the other side closed it"
        self._transport: asyncio.Transport | None = None

    @abstractmethod
    def received(self, message: Message) -> None:
        """Called with each message."""

    @abstractmethod
    def lost(self, why: str) -> None:
        """Called once when the connection has ended."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Message) -> None:
        """Sends a message with the next flush, in the next iteration of the event loop.

        A peer is disconnected if more than `max_unsent_bytes` wait to be sent to it. New calls are
        refused at half of this size, so that many large calls do not end the connection and all
        other calls on it.

        Raises:
            BufferFull: The message is a call, and the buffer is half full.
            UnicodeEncodeError: A text has a lone surrogate.
            ValueError: The message is longer than ``connection.max_message_bytes``.
        """
        payload = _encode(message)
        size, most = len(payload), self._limits.max_message_bytes
        if size > most:
            raise ValueError(
                f"a message has {size} bytes, and connection.max_message_bytes is {most}; raise the"
                " setting, or send less"
            )
        most = self._limits.max_unsent_bytes
        unsent = self._out_bytes + _LENGTH + size
        if self._transport and self.is_open:
            unsent += self._transport.get_write_buffer_size()
        if isinstance(message, Submit) and unsent > most / 2:
            raise BufferFull
        self._out += (size.to_bytes(_LENGTH, "little"), payload)
        self._out_bytes += _LENGTH + size
        if unsent > most:
            self.close(f"more than {most} bytes wait to be sent")
        elif not self._flushing and not self._paused:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self, why: str = "it was closed") -> None:
        """Ends the connection at once; `lost` is called soon after."""
        self._why = why
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        one = transport.get_extra_info("socket")
        if one is not None and one.family != socket.AF_UNIX:
            # A lost node does not close its connections. Without keep-alive, calls to it would
            # never end.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if option := getattr(socket, name, None):  # not every system has all options
                    one.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while self.is_open and len(buffer) - start >= _LENGTH:
            length = int.from_bytes(buffer[start : start + _LENGTH], "little")
            if length > self.most_received:
                self.close(f"a message has {length} bytes, more than {self.most_received}")
                break
            end = start + _LENGTH + length
            if len(buffer) < end:
                break
            try:
                message = _decode(bytes(memoryview(buffer)[start + _LENGTH : end]))
            except (msgspec.MsgspecError, ValueError) as error:
                self.close(f"a message cannot be read: {error}")
                break
            start = end
            self.received(message)
        del buffer[:start]

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost(str(exc) if exc else self._why)

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self.is_open and self._transport:
            self._transport.write(b"".join(self._out))
        self._out.clear()
        self._out_bytes = 0
