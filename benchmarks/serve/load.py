"""Load for an HTTP server: requests over connections that are kept, answers counted whole.

wrk asks where it is installed: it takes so little of the processor that the server has the rest.
Elsewhere, and for requests one after the other, a client in this process does.
"""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

WRK = shutil.which("wrk")
_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local requests, last = {}, 0
function init(args)
  for body in io.lines(os.getenv("WAY_IN_BODIES")) do
    requests[#requests + 1] = wrk.format(nil, nil, nil, body)
  end
end
function request()
  last = last % #requests + 1
  return requests[last]
end
function done(summary, latency, requests)
  local e = summary.errors
  print(string.format(
    '{"requests": %d, "seconds": %f, "errors": %d, "p50_ms": %f, "p99_ms": %f}',
    summary.requests, summary.duration / 1e6, e.connect + e.read + e.write + e.status + e.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""


@dataclass(frozen=True)
class Place:
    """Where requests go.

    Attributes:
        base: URL of the server.
    """

    base: str
    path: str


@dataclass(frozen=True)
class Answered:
    """One answer.

    Attributes:
        ended: When it was whole, by `time.perf_counter`.
        milliseconds: From the request's first byte to the answer's last.
        status: Of HTTP; 0: the connection was lost.
    """

    ended: float
    milliseconds: float
    status: int
    body: bytes

    @property
    def is_right(self) -> bool:
        """Whether the answer is a success and, if it is a stream, was not broken off."""
        streamed = self.body.startswith(b"data:")
        return self.status == 200 and (not streamed or self.body.endswith(b"[DONE]\n\n"))


@dataclass(frozen=True)
class Window:
    """What was answered within some seconds."""

    requests: int
    seconds: float
    errors: int
    p50_ms: float
    p99_ms: float

    @property
    def rate(self) -> float:
        return (self.requests - self.errors) / self.seconds


def window(place: Place, bodies: list[bytes], connections: int, seconds: float) -> Window:
    """Ask for so long over so many connections, the bodies in turn."""
    if WRK:
        return _by_wrk(WRK, place, bodies, connections, seconds)
    began = time.perf_counter()
    answers = asked(place, until(began + seconds, cycle(bodies)), connections)
    within = [answer for answer in answers if answer.ended <= began + seconds] or answers
    times = sorted(answer.milliseconds for answer in within)
    wrong = sum(not answer.is_right for answer in within)
    return Window(len(within), seconds, wrong, _of(times, 50), _of(times, 99))


def until(deadline: float, bodies: Iterable[bytes]) -> Iterator[bytes]:
    """The bodies until a time of `time.perf_counter`."""
    for body in bodies:
        if time.perf_counter() >= deadline:
            return
        yield body


def paced(bodies: Iterable[bytes], rate: float) -> Iterator[bytes]:
    """The bodies, each at its time; it blocks until then, so it is for one connection.

    Args:
        rate: Bodies a second.
    """
    due = time.perf_counter()
    for body in bodies:
        due += 1 / rate
        time.sleep(max(due - time.perf_counter(), 0))
        yield body


def asked(place: Place, bodies: Iterable[bytes], connections: int = 1) -> list[Answered]:
    """Send all bodies, each connection one after the other, and wait for the answers."""
    return asyncio.run(_asked(place, iter(bodies), connections))


async def _asked(place: Place, bodies: Iterator[bytes], connections: int) -> list[Answered]:
    url, found = urlsplit(place.base), list[Answered]()
    head = (
        f"POST {place.path} HTTP/1.1\r\nHost: {url.netloc}\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()
    requests = (b"%s%d\r\n\r\n%s" % (head, len(body), body) for body in bodies)
    loop = asyncio.get_running_loop()

    async def one() -> None:
        wants_more = True
        while wants_more:
            client = _Client(requests, found.append, loop.create_future())
            await loop.create_connection(lambda client=client: client, url.hostname, url.port)
            wants_more = await client.end

    await asyncio.gather(*(one() for _ in range(connections)))
    return found


class _Client(asyncio.Protocol):
    """One connection, to its end: whether that is the server's, who may end it with any answer."""

    def __init__(
        self,
        requests: Iterator[bytes],
        on_answer: Callable[[Answered], None],
        end: "asyncio.Future[bool]",
    ) -> None:
        self._requests, self._on_answer, self.end = requests, on_answer, end
        self._buffer = bytearray()
        self._began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        found = _whole(bytes(self._buffer))
        if found is None:
            return
        status, body, is_last = found
        self._answered(status, body)
        self._buffer.clear()
        if is_last:
            self._finish(wants_more=True)
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.end.done():
            self._answered(0, b"")
            self._finish(wants_more=True)

    def _send(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._finish(wants_more=False)
            return
        self._began = time.perf_counter()
        self._transport.write(request)

    def _finish(self, *, wants_more: bool) -> None:
        self.end.set_result(wants_more)
        self._transport.close()

    def _answered(self, status: int, body: bytes) -> None:
        now = time.perf_counter()
        self._on_answer(Answered(now, (now - self._began) * 1e3, status, body))


def _whole(data: bytes) -> tuple[int, bytes, bool] | None:
    """Status, body and whether the server ends the connection; None while it is not whole."""
    head, gap, body = data.partition(b"\r\n\r\n")
    if not gap:
        return None
    status, fields = int(head[9:12]), head.lower()
    is_last = b"\r\nconnection: close" in fields
    if b"transfer-encoding: chunked" in fields:
        return (status, _unchunked(body), is_last) if body.endswith(b"0\r\n\r\n") else None
    length = int(fields.split(b"content-length:")[1].split(b"\r\n")[0])
    return (status, body, is_last) if len(body) >= length else None


def _unchunked(rest: bytes) -> bytes:
    content = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return content
        content, rest = content + rest[:length], rest[length + 2 :]


def _by_wrk(
    program: str, place: Place, bodies: list[bytes], connections: int, seconds: float
) -> Window:
    with tempfile.TemporaryDirectory(prefix="way-in-wrk-") as name:
        folder = Path(name)
        (folder / "bodies").write_bytes(b"\n".join(bodies))
        (folder / "load.lua").write_text(_SCRIPT)
        command = [program, "-t1", f"-c{connections}", f"-d{round(seconds)}s", "--timeout", "60s"]
        done = subprocess.run(
            [*command, "-s", str(folder / "load.lua"), place.base + place.path],
            env={**os.environ, "WAY_IN_BODIES": str(folder / "bodies")},
            capture_output=True,
            text=True,
            check=True,
        )
    return Window(**json.loads(done.stdout.splitlines()[-1]))


def _of(values: list[float], percent: int) -> float:
    return values[min(len(values) * percent // 100, len(values) - 1)]
