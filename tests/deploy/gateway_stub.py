"""HTTP servers that stand in for gateways, and helpers that wait for events."""

import socket
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from support import DEADLINE_S, HttpServer

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"


class Gateway:
    """A small HTTP server that answers like a gateway, and can be made to misbehave."""

    def __init__(self, name: str) -> None:
        self.name, self.ready, self.dies = name, True, False
        self.posts: list[str | None] = []
        self.gets: list[str] = []
        self.probes = 0
        self.release = threading.Event()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/readyz":
                    gateway.probes += 1
                    self.send_response(200 if gateway.ready else 503)
                    self.end_headers()
                else:
                    gateway.gets.append(self.path)
                    self._named()

            def do_POST(self) -> None:
                gateway.posts.append(self.headers["X-Request-ID"])
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                if gateway.dies:
                    return  # the connection is closed without an answer
                if self.path == "/v1/stream":
                    self._streamed()
                    return
                if self.path == "/v1/slow":
                    gateway.release.wait(2 * DEADLINE_S)
                self._named()

            def _named(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(gateway.name.encode())

            def _streamed(self) -> None:
                """Sends one event at once, and the other when released."""
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b"data: first\n\n")
                gateway.release.wait(2 * DEADLINE_S)
                self.wfile.write(b"data: last\n\n")

            def log_message(self, *_: object) -> None:
                pass

        self._server = HttpServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.release.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
