"""The service as benchmarks run it, and its processes as seen from outside."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_MARK = "TASC_BENCH_MARK"
PROXIES = ("haproxy", "python")


@contextmanager
def serving_ray(proxy: str = PROXIES[0]) -> Iterator[None]:
    """A local Ray for a service, with one of Ray Serve's two proxies."""
    from tasc_jobs.ray_local import local_ray
    from tasc_serve.http.ray_proxy import environment
    from tasc_serve.settings import HttpSettings

    http = HttpSettings.model_validate({"proxy": proxy})
    with local_ray(num_cpus=4, object_store_mb=100, environment=partial(environment, http)):
        yield


def haproxy_modes(folder: Path) -> dict[str, str]:
    """The environment of Ray Serve's HAProxy and throughput modes; the folder holds its files."""
    own = {"CONFIG_FILE_LOC": "haproxy.cfg", "SOCKET_PATH": "admin.sock"}
    own |= {"SERVER_STATE_BASE": "", "SERVER_STATE_FILE": "server-state"}
    files = {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in own.items()}
    modes = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    return {**modes, **files}


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
    mark = uuid.uuid4().hex
    os.environ.update(marking(mark))
    return mark


def marking(mark: str) -> dict[str, str]:
    """The environment of a process that has this mark, as all that it starts."""
    return {_MARK: mark}


def marked(mark: str) -> list[int]:
    """All processes with this mark."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _has(folder, mark)]


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


def _has(folder: Path, mark: str | None) -> bool:
    try:
        return f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes()
    except OSError:
        return False  # the process has ended meanwhile, or is another user's


def _process(folder: Path, mark: str | None) -> Process | None:
    if not _has(folder, mark):
        return None
    try:
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
