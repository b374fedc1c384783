"""The real service with tiny models, to be mistreated; and its processes, seen from outside."""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

from fuzz_attacks import Surface
from fuzz_bodies import Endpoint
from serve_modes import haproxy_mode

MARK = "TASC_FUZZ_MARK"
MAX_BODY_BYTES = 1 << 20
_LIMITS = {
    "max_tokens": 24, "max_total_tokens": 64, "max_body_bytes": MAX_BODY_BYTES, "max_queued": 64,
    "request_timeout_s": 10, "guide_timeout_s": 2, "drain_timeout_s": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A service that runs.

    Attributes:
        key: An API key of it, where it asks for one.
        mark: In the environment of all its processes; unset: it is somebody else's.
    """

    base: str
    key: str | None = None
    mark: str | None = None

    def json(self, path: str, content: object = None) -> dict[str, object]:
        """The answer to one request; raises urllib.error.HTTPError for one that is an error."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        body = None if content is None else json.dumps(content).encode()
        with urlopen(Request(self.base + path, body, headers), timeout=60) as answer:
            found: dict[str, object] = json.load(answer)
        return found


@contextmanager
def running(folder: Path, haproxy: bool = False) -> Iterator[Target]:
    """Ray, Redis, two tasks, one of them with labels, and a key that they ask for."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    if haproxy:
        haproxy_mode(folder)
    import dataclasses

    from ray import serve
    from serving import ALPHA, BETA, make_task

    from tasc_jobs.ray_local import local_ray
    from tasc_serve import app
    from tasc_serve.settings import ServeSettings
    from tasc_store import ApiKeys, EmbeddedRedis, TaskStore, connect

    with EmbeddedRedis.start() as server, local_ray(num_cpus=4, object_store_mb=100):
        with connect(server.url) as client:
            alpha, beta = (make_task(folder / name, name).record for name in (ALPHA, BETA))
            TaskStore(client).put(alpha)
            TaskStore(client).put(dataclasses.replace(beta, choices=("yes", "no", "maybe so")))
            key, _ = ApiKeys(client).create("fuzz")
        content = {
            "tasks": [{"name": name, "num_cpus": 0.1} for name in (ALPHA, BETA)],
            "http": {"port": 0, "gateway_num_cpus": 0.1},
            "engine": {"rows": 4, "max_model_len": 256, "prefill_chunk": 64, "cost_aware": False},
            "limits": _LIMITS,
            "auth": {"required": True},
            "cache_dir": str(folder / "cache"),
        }
        base = app.start(ServeSettings.model_validate(content), server.url)
        try:
            yield Target(base, key, mark)
        finally:
            serve.shutdown()


def surface_of(target: Target) -> Surface:
    """What the service says that it takes."""
    told = target.json("/openapi.json")
    routes, endpoints = [], []
    for path, methods in told["paths"].items():  # type: ignore[attr-defined]
        for method, said in methods.items():
            routes.append((method.upper(), path))
            content = said.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                endpoints.append(Endpoint(path, content["application/json"]["schema"]))
    listed = target.json("/v1/models")["data"]
    tasks = [model["id"] for model in listed]  # type: ignore[attr-defined]
    return Surface(routes, endpoints, tasks, target.key, MAX_BODY_BYTES)


@dataclass(frozen=True)
class Process:
    """One process of the service.

    Attributes:
        role: ``gateway``, ``replica of a task`` or ``proxy``.
        memory: Resident bytes.
        files: Open file handles.
    """

    pid: int
    role: str
    memory: int
    files: int


def processes(target: Target) -> dict[int, Process]:
    """Those that requests pass through, by pid; none of a service of somebody else."""
    found = (_process(folder, target.mark) for folder in Path("/proc").glob("[0-9]*"))
    return {process.pid: process for process in found if process} if target.mark else {}


def _process(folder: Path, mark: str | None) -> Process | None:
    try:
        if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes():
            return None
        role = _role((folder / "cmdline").read_bytes().decode(errors="replace"))
        pages = int((folder / "statm").read_text().split()[1])
        files = len(list((folder / "fd").iterdir()))
    except OSError:
        return None  # it ended while we looked
    if role is None:
        return None
    return Process(int(folder.name), role, pages * os.sysconf("SC_PAGE_SIZE"), files)


def _role(command: str) -> str | None:
    name = command.replace("\0", " ").strip()
    if "ServeReplica" in name:
        deployment = name.split(":")[-1].split(".")[0]
        return "gateway" if deployment == "gateway" else f"replica of {deployment}"
    return "proxy" if "ProxyActor" in name or "haproxy" in name else None
