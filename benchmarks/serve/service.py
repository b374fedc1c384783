"""The service as benchmarks run it, and its processes as seen from outside."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARK = "TASC_BENCH_MARK"


def use_haproxy(folder: Path) -> None:
    """Put Ray Serve into its HAProxy and throughput modes; HAProxy keeps its files in the folder.

    Ray Serve reads this from the environment when it is imported.
    """
    own = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock"}
    own |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
    files = {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in own.items()}
    modes = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    os.environ.update({**modes, **files})


@contextmanager
def served(settings: Mapping[str, Any], redis_url: str) -> Iterator[str]:
    """Run the service in the Ray that is connected; yields its URL."""
    from ray import serve

    from tasc_serve import app
    from tasc_serve.settings import ServeSettings

    base = app.start(ServeSettings.model_validate(settings), redis_url)
    try:
        yield base
    finally:
        serve.shutdown()


def mark_processes() -> str:
    """Mark this process and all processes that it starts from now on; returns the mark."""
    os.environ[_MARK] = mark = uuid.uuid4().hex
    return mark


@dataclass(frozen=True)
class Process:
    """One process of the service.

    Attributes:
        role: ``gateway``, ``replica of TASK`` or ``proxy``.
        memory: Resident bytes.
        files: Open file handles.
    """

    pid: int
    role: str
    memory: int
    files: int


def processes(mark: str | None) -> dict[int, Process]:
    """The processes with this mark that requests pass through, by pid; none without a mark."""
    found = (_process(folder, mark) for folder in Path("/proc").glob("[0-9]*"))
    return {process.pid: process for process in found if process} if mark else {}


def _process(folder: Path, mark: str | None) -> Process | None:
    try:
        if f"{_MARK}={mark}".encode() not in (folder / "environ").read_bytes():
            return None
        role = _role((folder / "cmdline").read_bytes().decode(errors="replace"))
        pages = int((folder / "statm").read_text().split()[1])
        files = len(list((folder / "fd").iterdir()))
    except OSError:
        return None  # the process has ended meanwhile
    if role is None:
        return None
    return Process(int(folder.name), role, pages * os.sysconf("SC_PAGE_SIZE"), files)


def _role(command: str) -> str | None:
    name = command.replace("\0", " ").strip()
    if "ServeReplica" in name:
        deployment = name.split(":")[-1].split(".")[0]
        return "gateway" if deployment == "gateway" else f"replica of {deployment}"
    return "proxy" if "ProxyActor" in name or "haproxy" in name else None
