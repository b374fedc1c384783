"""The shipped HAProxy file, run by a real HAProxy on free ports."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway_stub import CONFIG, Gateway, accepts, eventually, free_port


@dataclass(frozen=True)
class Balancer:
    """Where it answers clients and operators, and its log."""

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
    """HAProxy in front of two gateways, once it has seen both ready; ended with the block."""
    port, operators = free_port(), free_port()
    own = {f"TASC_GATEWAY{i}": f"127.0.0.1:{g.port}" for i, g in enumerate(gateways)}
    own |= {"TASC_CLIENTS": f"127.0.0.1:{port}", "TASC_OPERATORS": f"127.0.0.1:{operators}"}
    log = folder / "haproxy.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [haproxy, "-f", str(CONFIG)],
            env={**os.environ, **own, **variables},
            stdout=sink,
            stderr=sink,
        )
    with process:
        try:
            eventually(lambda: accepts(port) and all(g.probes for g in gateways))
            yield Balancer(port, f"http://127.0.0.1:{operators}", log)
        finally:
            process.terminate()
