"""The socket of a replica: accepts connections of gateways and answers the calls on them.

A gateway requests an endpoint over its Ray Serve handle. The reply has a one-time token and an
address: a Unix socket on the same node, otherwise a TLS port. The handle call stays open as
long as the connection, so that Serve does not stop the replica before the gateway disconnects.
"""

import asyncio
import datetime
import errno
import logging
import os
import secrets
import socket
import ssl
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tasc_protocol import Output, Request
from tasc_runtime.errors import EngineBroken, ServiceError
from tasc_runtime.protocol import Refusal, ReplicaState
from tasc_serve import wire
from tasc_serve.settings import ConnectionSettings
from tasc_serve.wire import Connection, Endpoint, Message

log = logging.getLogger(__name__)
_BACKLOG = 64  # connections that wait to be accepted
_PORTS = 100  # number of ports to try, from the configured port on
_HELLO_BYTES = 1024  # maximum size of a message before the token


class Answers(Protocol):
    """The interface of the object that answers calls."""

    async def answer(self, request: Request, send: Callable[[Output | Refusal], None]) -> None:
        """Sends the outputs of a request. The last item has the result, or is a refusal.

        A request that does not stream has one output. Cancelling the asyncio task frees the row.
        """

    def state(self) -> ReplicaState:
        """Returns the replica's state; raises EngineBroken."""


class CallServer:
    """The endpoints of one replica. Belongs to the event loop that first requests an endpoint.

    Args:
        name: The replica's id; gateways compare it with the id that they expect.
        host: Address of this node that other nodes reach.
        node: This node's Ray id.

    Attributes:
        expected: A future for each expected connection, by token. It is done when the connection
            has ended.
        connections: All open connections.
    """

    def __init__(
        self, answers: Answers, name: str, host: str, node: str, settings: ConnectionSettings
    ) -> None:
        self.answers = answers
        self.name = name
        self.settings = settings
        self.expected: dict[bytes, asyncio.Future[None]] = {}
        self.connections: set[Connection] = set()
        self._host = host
        self._node = node
        self._servers: list[asyncio.Server] = []
        self._starting = asyncio.Lock()
        self._local: Endpoint | None = None
        self._remote: Endpoint | None = None

    async def attach(self, node: str) -> AsyncGenerator[Endpoint, None]:
        """Yields an endpoint for one connection; ends when the connection has ended.

        Raises:
            ServiceError: No connection was made within ``connection.connect_timeout_s``.
        """
        endpoint = await self._endpoint(node)
        token = secrets.token_bytes(32)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self.expected[token] = ended
        timer = loop.call_later(self.settings.connect_timeout_s, self._forget, token)
        try:
            yield Endpoint(endpoint.address, token, endpoint.certificate)
            await ended
        finally:
            timer.cancel()
            self.expected.pop(token, None)
            ended.cancel()

    def close(self) -> None:
        """Ends all connections. Call it on the event loop, or after the loop has ended."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.close("the replica is being stopped")
        if self._local:
            with suppress(OSError):
                os.unlink(str(self._local.address))

    def _forget(self, token: bytes) -> None:
        ended = self.expected.pop(token, None)
        if ended and not ended.done():
            limit_s = self.settings.connect_timeout_s
            ended.set_exception(ServiceError(f"no gateway connected within {limit_s:g} s"))

    async def _endpoint(self, node: str) -> Endpoint:
        if node == self._node:
            try:
                return await self._local_endpoint()
            except (OSError, ServiceError) as error:  # such as a TMPDIR too long for a socket path
                log.warning("gateways of this node use TLS, not a Unix socket: %s", error)
        return await self._tls_endpoint()

    async def _local_endpoint(self) -> Endpoint:
        async with self._starting:
            if self._local is None or not os.path.exists(str(self._local.address)):
                path = str(socket_folder() / f"{os.getpid()}-{secrets.token_hex(4)}")
                loop = asyncio.get_running_loop()
                server = await loop.create_unix_server(self._accepted, path, backlog=_BACKLOG)
                self._servers.append(server)
                self._local = Endpoint(path, b"")
        return self._local

    async def _tls_endpoint(self) -> Endpoint:
        async with self._starting:
            if self._remote is None:
                context, certificate = _own_certificate()
                server = await self._listening(context)
                self._servers.append(server)
                port = server.sockets[0].getsockname()[1]
                self._remote = Endpoint((self._host, port), b"", certificate)
        return self._remote

    async def _listening(self, context: ssl.SSLContext) -> asyncio.Server:
        loop, first = asyncio.get_running_loop(), self.settings.port
        for port in range(first, first + (_PORTS if first else 1)):
            try:
                return await loop.create_server(
                    self._accepted,
                    self._host,
                    port,
                    ssl=context,
                    ssl_handshake_timeout=self.settings.connect_timeout_s,
                    backlog=_BACKLOG,
                )
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise ServiceError(
            f"{self._host} has no free port from {first} to {first + _PORTS - 1}; set another"
            " connection.port"
        )

    def _accepted(self) -> Connection:
        return _GatewayConnection(self)


class _GatewayConnection(Connection):
    """One gateway's connection, from its token to its end."""

    def __init__(self, server: CallServer) -> None:
        super().__init__(server.settings)
        self.most_received = _HELLO_BYTES
        self._server, self._answers = server, server.answers
        self._ended: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Registers the connection. With TLS, this is called after a successful handshake."""
        super().connection_made(transport)
        self._server.connections.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.connect_timeout_s, self._require_token)

    def _require_token(self) -> None:
        if self._ended is None:
            self.close("no token was received in time")

    def received(self, message: Message) -> None:
        if self._ended is None:
            self._greet(message)
        elif isinstance(message, wire.Submit):
            number, request = message.number, message.request
            answer = self._answers.answer(request, partial(self._reply, number))
            self._calls[number] = answering = asyncio.create_task(answer)
            answering.add_done_callback(partial(self._end, number, request.id))
        elif isinstance(message, wire.Cancel):
            if call := self._calls.get(message.number):
                call.cancel()
        elif isinstance(message, wire.Heartbeat):
            self.send(self._state(message.number))

    def _greet(self, message: Message) -> None:
        token = message.token if isinstance(message, wire.Hello) else b""
        ended = self._server.expected.pop(token, None)
        if ended is None or ended.done():
            self.close("the token is unknown or too late")
            return
        self._ended = ended
        self.most_received = self._limits.max_message_bytes
        self.send(wire.Welcome(self._server.name))

    def _state(self, number: int) -> wire.HeartbeatReply | wire.Failed:
        try:
            return wire.HeartbeatReply(number, self._answers.state())
        except EngineBroken as error:
            return wire.Failed(number, "broken", str(error))

    def _reply(self, number: int, item: Output | Refusal) -> None:
        if isinstance(item, Refusal):
            self.send(wire.Refused(number, item))
        else:
            self.send(wire.Answered(number, item))

    def _end(self, number: int, call_id: str, answering: asyncio.Task[None]) -> None:
        """Forgets a call that has ended, and reports its error."""
        del self._calls[number]
        error = None if answering.cancelled() else answering.exception()
        if isinstance(error, EngineBroken):
            self.send(wire.Failed(number, "broken", str(error)))
        elif error:
            log.error("call %s failed", call_id, exc_info=error)
            self.send(wire.Failed(number, "unexpected", repr(error)))

    def lost(self, why: str) -> None:
        self._timer.cancel()
        self._server.connections.discard(self)
        for call in self._calls.values():
            call.cancel()
        if self._ended is None:
            log.warning("a connection ended before it was accepted: %s", why)
        elif not self._ended.done():
            self._ended.set_result(None)


def socket_folder() -> Path:
    """Returns the folder of this user's sockets, and removes sockets of processes that have ended.

    The folder has mode 700.

    Raises:
        ServiceError: The folder exists with another owner or mode.
    """
    folder = Path(tempfile.gettempdir()) / f"tasc-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700 or folder.is_symlink():
        raise ServiceError(
            f"{folder} belongs to user {found.st_uid} and has mode {found.st_mode & 0o777:o}; it"
            f" must belong to user {os.geteuid()} and have mode 700: remove it, or set TMPDIR to"
            " another folder"
        )
    for path in folder.iterdir():
        pid = path.name.partition("-")[0]
        if pid.isdigit() and not _lives(int(pid)) and not _listens(path):
            path.unlink(missing_ok=True)
    return folder


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _listens(path: Path) -> bool:
    """Whether a process listens on a socket, maybe in a container that shares the folder."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a suspended process would accept nothing for ever
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _own_certificate() -> tuple[ssl.SSLContext, str]:
    """Makes a key and a self-signed certificate for this process.

    Returns:
        The server's TLS context, and the certificate as PEM, which gateways get over Ray's handle.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tasc-replica")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of nodes differ
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:  # of mode 700; ssl reads keys from files only
        path = Path(folder) / "pem"
        path.write_bytes(private + pem)
        context.load_cert_chain(path)
    return context, pem.decode()
