"""An S3 server on loopback, moto's, and an HTTP proxy in front of it that fails by a seed."""

import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Final, Self

import httpx

from support import eventually, free_port

HOST: Final = "127.0.0.1"
REGION: Final = "us-east-1"
_KEY: Final = "testing"  # moto accepts any


def credentials() -> dict[str, str]:
    """Environment variables of credentials, without those of the machine."""
    return {
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _KEY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@dataclass(frozen=True)
class Endpoint:
    """An address that speaks S3."""

    port: int

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which ``s3://bucket/key`` alone is an object there."""
        return {**credentials(), "AWS_ENDPOINT_URL": self.address}

    @property
    def query(self) -> str:
        """The options that name the endpoint in a URL for pyarrow."""
        return f"scheme=http&endpoint_override={HOST}%3A{self.port}&region={REGION}"

    def url(self, bucket: str, key: str = "") -> str:
        """A URL for a process that does not have `environment`; it needs `credentials`."""
        return f"{short_url(bucket, key)}?{self.query}"


def short_url(bucket: str, key: str = "") -> str:
    """A URL for a process with the environment of an endpoint."""
    return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"


class ObjectStore:
    """A server in a child process, with nothing in it; it ends with the block."""

    def __enter__(self) -> Self:
        self.endpoint = Endpoint(free_port())
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.endpoint.port)],
            env={**os.environ, **credentials(), "PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            eventually(self._answers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it has nothing to save
        self._process.wait()
        self._log.close()

    def make(self, bucket: str) -> str:
        """Make a bucket; returns its name."""
        httpx.put(f"{self.endpoint.address}/{bucket}", trust_env=False).raise_for_status()
        return bucket

    def unfinished(self, bucket: str) -> int:
        """The number of multipart uploads that were neither completed nor aborted."""
        found = httpx.get(f"{self.endpoint.address}/{bucket}?uploads", trust_env=False)
        return found.raise_for_status().text.count("<UploadId>")

    def _answers(self) -> bool:
        if (status := self._process.poll()) is not None:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"moto's server ended with status {status}: {said}")
        try:
            found = httpx.get(f"{self.endpoint.address}/moto-api/", timeout=5, trust_env=False)
        except httpx.TransportError:
            return False
        return found.is_success


FAULTS: Final = ("error", "slow_down", "delay", "cut_request", "cut_response")


@dataclass(frozen=True)
class Faults:
    """The share of requests with each fault, between 0 and 1; together at most 1.

    Attributes:
        error: The answer is 500 InternalError, and the server does not see the request.
        slow_down: The answer is 503 SlowDown, and the server does not see the request.
        delay: The request is passed on after ``delay_s``.
        cut_request: The connection is reset after half of the request's body, or after its head.
        cut_response: The server answers, and the connection is reset after half of the body, or
            within the head if there is no body. A write is then done, but its client gets no
            answer.
        most: A request, and each further attempt of it, meets at most this many faults.
        methods: Only requests with these methods meet faults.
    """

    error: float = 0.0
    slow_down: float = 0.0
    delay: float = 0.0
    cut_request: float = 0.0
    cut_response: float = 0.0
    delay_s: float = 0.5
    most: int = 1_000_000
    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")

    def chosen(self, seed: int, request: str, attempt: int) -> str | None:
        """The fault of an attempt, which no order of the requests changes."""
        if attempt >= self.most or request.partition(" ")[0] not in self.methods:
            return None
        left = random.Random(f"{seed} {attempt} {request}").random()
        for name in FAULTS:
            left -= getattr(self, name)
            if left < 0:
                return name
        return None


class FaultyProxy:
    """Passes HTTP requests on to a server on loopback; each connection has a thread.

    The same seed gives the same faults to the same requests, where an attempt of a request is known
    by its method, path, query without upload id, and range.

    Attributes:
        did: The number of each fault, and of requests that were ``passed`` on without one.
        faults: It can be changed at any time.
    """

    def __init__(self, port: int, faults: Faults = Faults(), seed: int = 0) -> None:
        self.faults, self.seed, self.did = faults, seed, Counter[str]()
        self._attempts, self._lock, self._to = Counter[str](), Lock(), port
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._server.daemon_threads = True  # connections that a client keeps do not delay the end
        self._server.block_on_close = False
        self.endpoint = Endpoint(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def fault(self, request: str) -> str | None:
        """Choose and count what this attempt of a request meets."""
        with self._lock:
            attempt = self._attempts[request]
            self._attempts[request] += 1
            found = self.faults.chosen(self.seed, request, attempt)
            self.did[found or "passed"] += 1
        return found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy, to = self, self._to

        class Handler(_Handler):
            def serve(self) -> None:
                with suppress(ConnectionError):
                    self.answer(proxy, to)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815

        return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer's head is one packet
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        found = super().handle_expect_100()
        self.wfile.flush()  # the client waits a second for it
        return found

    def answer(self, proxy: FaultyProxy, to: int) -> None:
        path, _, query = self.path.partition("?")
        options = "&".join(sorted(o for o in query.split("&") if not o.startswith("uploadId=")))
        fault = proxy.fault(f"{self.command} {path} {options} {self.headers.get('Range', '')}")
        size = int(self.headers.get("Content-Length") or 0)
        if fault == "cut_request":
            self.rfile.read(size // 2)
            return self.reset()
        body = self.body(size)
        if fault == "error":
            return self.refuse(500, "InternalError", "We encountered an internal error.")
        if fault == "slow_down":
            return self.refuse(503, "SlowDown", "Please reduce your request rate.")
        if fault == "delay":
            time.sleep(proxy.faults.delay_s)
        upstream = HTTPConnection(HOST, to)
        try:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            upstream.request(self.command, self.path, body, kept)
            with upstream.getresponse() as found:
                content = found.read()
                heads = {k: v for k, v in found.getheaders() if k.lower() not in _HOP_BY_HOP}
                size = len(content) if content else int(found.getheader("Content-Length") or 0)
                status = found.status
        finally:
            upstream.close()
        if fault == "cut_response" and not content:
            self.wfile.write(f"HTTP/1.1 {status} ".encode())
            return self.reset()
        self.head(status, heads, size)
        self.wfile.write(content[: len(content) // 2] if fault == "cut_response" else content)
        if fault == "cut_response":
            self.reset()

    def body(self, size: int) -> bytes:
        """The body of the request, which may come in chunks."""
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(size)
        parts = []
        while length := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(length))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return b"".join(parts)

    def head(self, status: int, headers: Mapping[str, str], size: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(size))
        self.end_headers()

    def refuse(self, status: int, code: str, message: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        body = b"" if self.command == "HEAD" else text.encode()
        self.head(status, {"Content-Type": "application/xml"}, len(body))
        self.wfile.write(body)

    def reset(self) -> None:
        """End the connection with a reset, so that the client cannot take it for a whole answer."""
        self.wfile.flush()
        time.sleep(0.01)  # a reset would discard what the client has not read
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.close(self.connection.detach())  # its files would keep it open
        self.close_connection = True
        raise ConnectionResetError


_HOP_BY_HOP: Final = ("connection", "content-length", "transfer-encoding", "keep-alive", "expect")
