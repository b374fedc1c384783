"""The attacks of the fuzz benchmark: HTTP requests, and bytes that only resemble HTTP."""

import functools
import gzip
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from benchmarks.fuzz.bodies import MAX_TEXT, Bodies, Endpoint, broken, text
from benchmarks.fuzz.wire import Attack

_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "get")
_TYPES = (
    "application/json", "application/json", "text/plain", "application/json; charset=utf-16",
    "multipart/form-data", "application/x-www-form-urlencoded", "x/y; boundary=" + "b" * 300, "",
)  # fmt: skip
_GARBAGE: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: rng.randbytes(rng.randint(1, 5000)),
    lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300),  # TLS
    lambda rng: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(30),
    lambda rng: b"*1\r\n$4\r\nPING\r\n",
    lambda rng: b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    lambda rng: b"GET /healthz\r\n\r\n",
    lambda rng: b"GET /healthz HTTP/1.1\nHost: x\nConnection: close\n\n",
    lambda rng: b"GET /" + b"a" * rng.choice([9_000, 70_000, 300_000]) + b" HTTP/1.1\r\n\r\n",
    lambda rng: b"\r\n" * rng.randint(1, 20_000),
    lambda rng: b"POST /v1/completions HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    lambda rng: b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\nhello",
    lambda rng: b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n{}",
    lambda rng: b"GET /healthz HTTP/1.1\r\n Host: folded\r\n\tmore\r\n\r\n",
    lambda rng: b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    lambda rng: b"GET /healthz HTTP/1.1\r\nHo st: x\r\nNo-Colon\r\n\r\n",
)
_CHUNKS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: b"zz\r\n{}\r\n0\r\n\r\n",
    lambda rng: b"ffffffffffffffffff\r\n{}\r\n",
    lambda rng: b"-1\r\n{}\r\n0\r\n\r\n",
    lambda rng: b"2;" + b"x" * rng.choice([10, 100_000]) + b"\r\n{}\r\n0\r\n\r\n",
    lambda rng: b"1\r\n{\r\n1\r\n}\r\n0\r\nTrailer: x\r\n\r\n",
    lambda rng: b"".join(b"1\r\n \r\n" for _ in range(3000)) + b"0\r\n\r\n",
    lambda rng: b"2\r\n{}0\r\n\r\n",
    lambda rng: rng.randbytes(500),
)


@dataclass(frozen=True)
class Surface:
    """What the service offers: methods and paths, and the endpoints that take JSON."""

    routes: Sequence[tuple[str, str]]
    endpoints: Sequence[Endpoint]
    tasks: Sequence[str]
    key: str | None
    max_body_bytes: int


@functools.cache
def _bomb(size: int) -> bytes:
    return gzip.compress(b" " * size, mtime=0)


class Attacks:
    """An endless sequence of attacks; the random numbers alone determine it."""

    def __init__(self, surface: Surface, rng: random.Random) -> None:
        self._surface, self._rng = surface, rng
        self._bodies = {e.path: Bodies(e, surface.tasks, rng) for e in surface.endpoints}
        makes: Sequence[tuple[int, Callable[[], Attack]]] = (
            (54, self.body), (6, self.packed), (12, self.route), (6, self.form),
            (4, self.headers), (3, self.left), (4, self.garbage), (3, self.chunked),
            (3, self.lengths), (2, self.pipelined), (2, self.slow), (1, self.huge),
        )  # fmt: skip
        self._makes = [make for _, make in makes]
        self._weights = [weight for weight, _ in makes]

    def next(self) -> Attack:
        (make,) = self._rng.choices(self._makes, self._weights)
        return make()

    def body(self) -> Attack:
        """A JSON body by the schema of the service; most have an error."""
        path, content = self._json()
        return Attack("body", [self._request("POST", path, content)], answered=True)

    def packed(self) -> Attack:
        """A JSON body that is compressed, or says so, or unpacks to far more than is allowed."""
        rng = self._rng
        path, content = self._json()
        whole = gzip.compress(content, mtime=0)
        bomb = _bomb(rng.choice([1, 64]) * self._surface.max_body_bytes)
        content = rng.choice(
            [whole, whole, whole, broken(whole, rng), content, whole * 2, bomb, bomb[:-9],
             zlib.compress(content)]
        )  # fmt: skip
        encoding = rng.choice(["gzip"] * 6 + ["GZIP", "br", "deflate", "gzip, gzip", "", "\xff"])
        request = self._request("POST", path, content, {"Content-Encoding": encoding})
        return Attack("packed", [request], answered=True)

    def route(self) -> Attack:
        rng = self._rng
        method, path = rng.choice(self._surface.routes)
        while "{" in path:
            before, _, rest = path.partition("{")
            path = before + quote(text(rng)[:300], safe="/" * rng.randint(0, 1), errors="replace")
            path += rest.partition("}")[2]
        if rng.random() < 0.3:
            method = rng.choice(_METHODS)
        if rng.random() < 0.3:
            path += rng.choice(
                ["/", "//", "/..", "%00", "%ff", "?x=%zz", "?limit=-1&after=%00", "?limit=9e9"]
            )
        if rng.random() < 0.1:
            path = "/" + quote(text(rng)[:2000], errors="replace")
        return Attack("route", [self._request(method, path, b"")], answered=method in _METHODS[:7])

    def form(self) -> Attack:
        """An upload of a file, in a form that is complete or not."""
        rng = self._rng
        lines = b"\n".join(self._json()[1][:3000] for _ in range(rng.randint(0, 3)))
        name = rng.choice(['"a.jsonl"', '""', "a", '"../../x"', '"' + "n" * 3000 + '"', '"\xff"'])
        field = rng.choice(["file", "file", "purpose", "x" * 3000, ""])
        parts = [
            b"--B\r\nContent-Disposition: form-data; name=purpose\r\n\r\n"
            + rng.choice([b"batch", b"batch", b"fine-tune", b"", b"x" * 5000]),
            f"--B\r\nContent-Disposition: form-data; name={field}; filename={name}\r\n\r\n".encode()
            + rng.choice([lines, lines, b"", rng.randbytes(2000)]),
        ] * rng.choice([1, 1, 1, 30])
        content = b"\r\n".join(parts) + rng.choice(
            [b"\r\n--B--\r\n", b"\r\n--B--\r\n", b"", b"--B-"]
        )
        content = broken(content, rng) if rng.random() < 0.2 else content
        kind = rng.choice(["multipart/form-data; boundary=B"] * 5 + ["multipart/form-data"])
        request = self._request("POST", "/v1/files", content, {"Content-Type": kind})
        return Attack("form", [request], answered=True)

    def headers(self) -> Attack:
        rng = self._rng
        _, content = self._json()
        name = rng.choice(
            ["Authorization", "Idempotency-Key", "X-Request-ID", "Accept-Encoding", "Cookie",
             "Host",
             "Content-Encoding", "Expect", "Traceparent", "Upgrade", "serve_multiplexed_model_id"]
        )  # fmt: skip
        value = rng.choice(
            ["Bearer " + "k" * 60, "Bearer tasc_" + "A" * 43, "Bearer", "gzip", "100-continue",
             "h2c",
             "\xff\xfe", "", "a,b;c=d", "x" * rng.choice([255, 256, 4000, 60_000])]
        )  # fmt: skip
        request = self._request("POST", self._path(), content, {name: value})
        return Attack("headers", [request], answered=False, leave_s=20.0)

    def left(self) -> Attack:
        """A client that disconnects in the middle of its answer."""
        rng = self._rng
        fields = '"stream": true, "prompt": "hi", "max_tokens": 24, "ignore_eos": true'
        content = f'{{"model": "{rng.choice(self._surface.tasks)}", {fields}}}'.encode()
        request = self._request("POST", "/v1/completions", content)
        return Attack("left", [request], leave_bytes=rng.choice([1, 300, 900]))

    def garbage(self) -> Attack:
        rng = self._rng
        content = rng.choice(_GARBAGE)(rng)
        return Attack("garbage", [content], half_close=rng.random() < 0.5, leave_s=0.5)

    def chunked(self) -> Attack:
        rng = self._rng
        head = self._head("POST", self._path(), {"Transfer-Encoding": "chunked"})
        content = rng.choice(_CHUNKS)(rng)
        return Attack("chunked", [head, content], half_close=rng.random() < 0.3, leave_s=1.0)

    def lengths(self) -> Attack:
        """A body that is shorter or longer than its Content-Length."""
        rng = self._rng
        path, content = self._json()
        said = max(len(content) + rng.choice([-5, -1, 1, 1000]), 0)
        headers = {"Content-Length": str(said)}
        if rng.random() < 0.2:
            headers |= {"Transfer-Encoding": "chunked"}
        request = self._head("POST", path, headers) + content
        waits = None if said <= len(content) and rng.random() < 0.5 else 1.0
        return Attack("lengths", [request], half_close=rng.random() < 0.3, leave_s=waits)

    def pipelined(self) -> Attack:
        rng = self._rng
        requests = [
            self._request("POST", *self._json(), keep=True) for _ in range(rng.randint(2, 6))
        ]
        requests.append(self._request("GET", "/healthz", b""))
        return Attack("pipelined", [b"".join(requests)], leave_s=20.0)

    def slow(self) -> Attack:
        """A request that is sent slowly, perhaps not to its end."""
        rng = self._rng
        request = self._request("POST", *self._json())[: rng.choice([30, 200, 2000])]
        steps: list[bytes | float] = []
        for start in range(0, len(request), max(len(request) // 10, 1)):
            steps += [request[start : start + max(len(request) // 10, 1)], rng.uniform(0, 0.1)]
        return Attack("slow", steps, half_close=rng.random() < 0.5, leave_s=rng.choice([0.1, 1.0]))

    def huge(self) -> Attack:
        """A body of about the greatest size that is allowed."""
        rng = self._rng
        most = self._surface.max_body_bytes
        size = rng.choice([most - 100, most, most + 1, 2 * most, MAX_TEXT])
        start = f'{{"model": "{self._surface.tasks[0]}", "prompt": '.encode()
        filled = rng.choice(
            [b'"' + b"x" * size, b"[" + b"1," * (size // 2), b"[" * size, b" " * size]
        )
        content = (start + filled)[: size - 2] + rng.choice([b'"}', b"]}", b"}}"])
        return Attack("huge", [self._request("POST", "/v1/completions", content)], answered=False)

    def _json(self) -> tuple[str, bytes]:
        path = self._path()
        return path, self._bodies[path].make()

    def _path(self) -> str:
        """A path; most often that of an endpoint that generates, which reaches the replicas."""
        paths = sorted(self._bodies)
        weights = [5 if path.endswith(("completions", "responses")) else 1 for path in paths]
        return self._rng.choices(paths, weights)[0]

    def _request(
        self,
        method: str,
        path: str,
        content: bytes,
        headers: dict[str, str] | None = None,
        *,
        keep: bool = False,
    ) -> bytes:
        sized = {
            "Content-Length": str(len(content)),
            "Connection": "keep-alive" if keep else "close",
        }
        if self._rng.random() < 0.05:
            sized["Content-Type"] = self._rng.choice(_TYPES)
        return self._head(method, path, {**sized, **(headers or {})}) + content

    def _head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        usual = {"Host": "fuzz", "Connection": "close", "Content-Type": "application/json"}
        if self._surface.key and self._rng.random() < 0.98:
            usual["Authorization"] = f"Bearer {self._surface.key}"
        lines = [f"{name}: {value}" for name, value in {**usual, **headers}.items()]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode(
            "latin-1", "replace"
        )
