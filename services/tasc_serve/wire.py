"""Messages between gateway and replica, and the connection that carries them.

A gateway has one connection to each replica. Each message is msgpack behind its length; what one
round of the event loop has to send is written at once. Decoding is typed: nothing is unpickled.
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

import msgspec

from tasc_protocol import Output, Request
from tasc_runtime.protocol import Pulse, Refusal
from tasc_serve.settings import ConnectionSettings

_LENGTH: Final = 4  # bytes, little-endian
# Times are in seconds, TCP_USER_TIMEOUT is in milliseconds.
_KEEPALIVE: Final = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPALIVE": 10,  # macOS's name of it
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}


@dataclass(frozen=True)
class AttachRequest:
    """Asks one replica for an endpoint. The only message that travels over a Ray Serve handle.

    Attributes:
        replica_id: The replica; empty: any, and no endpoint is made.
        node: The gateway's Ray node. On the replica's own node the endpoint is a Unix socket.
    """

    replica_id: str
    node: str = ""


@dataclass(frozen=True)
class Endpoint:
    """Where a replica takes one connection, and what proves both sides.

    Attributes:
        address: Path of a Unix socket, or host and port.
        token: The gateway shows it once. It is good for one connection.
        certificate: PEM of the only certificate to be trusted; None on a Unix socket.
    """

    address: str | tuple[str, int]
    token: bytes
    certificate: str | None = None


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first message of a gateway."""

    token: bytes


class Submit(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Asks for an answer, in parts unless ``whole``; ``number`` names it on this connection."""

    number: int
    whole: bool
    request: Request


class Cancel(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Nobody waits for the answer any more."""

    number: int


class Heartbeat(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Asks for the replica's pulse."""

    number: int


class Welcome(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The first message of a replica."""

    replica_id: str


class Answered(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """A part of an answer, or all of it; the last one has the result."""

    number: int
    output: Output


class Refused(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """A call that is not taken, or breaks off."""

    number: int
    refusal: Refusal


class HeartbeatReply(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The replica's pulse."""

    number: int
    pulse: Pulse


class Failed(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """The replica's engine is broken, or it met an error that nobody foresaw."""

    number: int
    kind: Literal["broken", "unexpected"]
    message: str


ToReplica: TypeAlias = Hello | Submit | Cancel | Heartbeat
ToGateway: TypeAlias = Welcome | Answered | Refused | HeartbeatReply | Failed
Message: TypeAlias = ToReplica | ToGateway

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class BufferFull(Exception):
    """So much waits to be sent to a peer that it gets no more calls."""


class Connection(asyncio.Protocol, ABC):
    """One side of a connection. Cuts off a peer that exceeds one of the limits.

    Attributes:
        most_received: Bytes of the longest message that the peer may send.
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
        """Send with the next flush, at the end of this round of the event loop.

        A peer that has not read ``connection.max_buffer_bytes`` is cut off. Calls are refused at
        half of it, so that many large ones do not end the connection, and with it other calls.

        Raises:
            BufferFull: The message is a call, and the buffer is half full.
            UnicodeEncodeError: A text has a lone surrogate.
            ValueError: The message is longer than ``connection.max_message_bytes``.
        """
        payload = _encode(message)
        size, most = len(payload), self._limits.max_message_bytes
        if size > most:
            raise ValueError(
                f"a message has {size} bytes, connection.max_message_bytes is {most}; raise it, or"
                " send less"
            )
        most = self._limits.max_buffer_bytes
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
        """End the connection at once; `lost` is called soon."""
        self._why = why
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's class is not a subclass of it
        one = transport.get_extra_info("socket")
        if one is not None and one.family != socket.AF_UNIX:
            # A lost node closes nothing: without these its calls would be held for ever.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if option := getattr(socket, name, None):  # not every system has all of them
                    one.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while self.is_open and len(buffer) - start >= _LENGTH:
            length = int.from_bytes(buffer[start : start + _LENGTH], "little")
            if length > self.most_received:
                self.close(f"a message of {length} bytes was announced")
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
