"""A TCP proxy in this process: it passes connections on to a server, with TLS if it is asked to."""

import select
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

HOST = "127.0.0.1"


class Forwarder:
    """Sends each new connection to ``port``; existing connections do not change."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self.port, self._context = port, context
        self._listener = socket.create_server((HOST, 0))
        scheme = "rediss" if context else "redis"
        self.url = f"{scheme}://{HOST}:{self._listener.getsockname()[1]}/0"
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def close(self) -> None:
        """Wait for the end of all connections, which clients must have closed."""
        self._listener.shutdown(socket.SHUT_RDWR)  # ends accept
        for thread in self._threads:
            thread.join()

    def _begin(self, run: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=run, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                self._begin(self._serve, self._listener.accept()[0])

    def _serve(self, taken: socket.socket) -> None:
        with suppress(OSError), taken:
            if self._context:
                taken = self._context.wrap_socket(taken, server_side=True)
            with taken, socket.create_connection((HOST, self.port)) as other:
                peers = {taken: other, other: taken}
                while True:
                    for ready in select.select(list(peers), [], [])[0]:
                        if not (data := ready.recv(65536)):
                            return
                        peers[ready].sendall(data)
