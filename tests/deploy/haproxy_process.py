"""The shipped HAProxy file, run by a real HAProxy on free ports."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from gateway_stub import CONFIG, Gateway, accepts

from support import DEADLINE_S, eventually, free_port
from tasc_serve.http.ray_proxy import binary

# The deadline ends a broken test, and no healthy one on a slow machine.
get = partial(httpx.get, timeout=DEADLINE_S)
post = partial(httpx.post, timeout=DEADLINE_S)
stream = partial(httpx.stream, timeout=DEADLINE_S)


def find_haproxy() -> str | None:
    """Returns the HAProxy on PATH, or else the one that Ray Serve includes."""
    return shutil.which("haproxy") or binary()


@dataclass(frozen=True)
class Balancer:
    """The addresses of HAProxy for clients and operators, and its log."""

    port: int
    operators: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def balancing(
    haproxy: str, gateways: Sequence[Gateway], folder: Path, **variables: str
) -> Iterator[Balancer]:
    """Runs HAProxy in front of two gateways for the block, which starts when both are ready."""
    addresses = [f"127.0.0.1:{gateway.port}" for gateway in gateways]
    with balancing_addresses(haproxy, addresses, folder, **variables) as running:
        eventually(lambda: all(g.probes for g in gateways))
        yield running


@contextmanager
def balancing_addresses(
    haproxy: str, addresses: Sequence[str], folder: Path, **variables: str
) -> Iterator[Balancer]:
    """Runs HAProxy in front of gateways at two addresses for the block, ready or not."""
    port, operators = free_port(), free_port()
    own = {f"TASC_GATEWAY{i}": address for i, address in enumerate(addresses)}
    own |= {"TASC_CLIENTS": f"127.0.0.1:{port}", "TASC_OPERATORS": f"127.0.0.1:{operators}"}
    log, command = folder / "haproxy.log", [haproxy, "-f", str(CONFIG)]
    env = {**os.environ, **own, **variables}
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=sink)
    with process:
        try:
            eventually(lambda: accepts(port))
            yield Balancer(port, f"http://127.0.0.1:{operators}", log)
        finally:
            process.terminate()
