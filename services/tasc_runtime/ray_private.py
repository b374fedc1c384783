"""Private parts of Ray, and Ray's configuration of HAProxy, on which this project depends.

Ray has no public setting for any of these parts, and a new version of Ray may change them without
notice. So they are collected in this module, with the version that they were checked against.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

CHECKED: Final = "2.60.0"
_LOCAL: Final = re.compile(r" (?:127\.0\.0\.1|::1)(:\d+ )")


@contextmanager
def loopback_only() -> Iterator[Mapping[str, str]]:
    """Makes a Ray that starts in the block use the address 127.0.0.1 alone.

    Yields the environment variables that Ray's processes need for this. Ray's parameter for the
    address does not help, since Ray replaces a loopback address by another address.
    """
    from ray._private import ray_constants

    # Ray has read the variable on import; only its child processes read it again.
    with changed(ray_constants, ENABLE_RAY_CLUSTER=False):
        yield {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}


@contextmanager
def messages_to_stderr() -> Iterator[None]:
    """Makes Ray print messages about workers to stderr, because stdout has a command's result."""
    from ray._private import worker

    print_it = worker.print_to_stdstream

    def print_error(data: dict[str, Any], ignore_prefix: bool) -> None:
        print_it({**data, "is_err": True}, ignore_prefix)

    with changed(worker, print_to_stdstream=print_error):
        yield


def running_ray() -> str | None:
    """Returns the address of a running Ray that ``ray start`` started on this machine."""
    from ray._private import services

    address: str | None = services.find_bootstrap_address(None)
    return address if address in services.find_gcs_addresses() else None


def versioned(deployment: Any, version: str) -> Any:
    """A deployment of Serve whose replicas are kept if it is deployed again with the same version.

    Without a version, Serve replaces all replicas of an application each time. The option is
    ignored for an application that is deployed by a config file, where the config's ``args``
    decide.
    """
    return deployment.options(version=version, _internal=True)


def over_grpc(handle: Any) -> Any:
    """A handle of Serve that streams over gRPC, whatever the deploying process's environment says.

    With Ray actor calls, one call to an unreachable node would block all others.
    """
    return handle.options(stream=True, _by_reference=False)


def callable_without_loop(handle: Any) -> Any:
    """A handle of Serve that can be called where no event loop runs."""
    if not handle.is_initialized:
        handle._init(_run_router_in_separate_loop=True)
    return handle


def haproxy_config(config: str, page: Path, arrival: str, *, keep_log: bool = False) -> str:
    """Returns Ray's configuration of HAProxy with changes for which Ray has no setting.

    The statistics page and the metrics exporter, which listen on all interfaces, are removed.
    HAProxy's own errors are answered with ``page``. Each request gets the header ``arrival`` with
    its time of arrival in microseconds. Gateways of this node are preferred, since other nodes may
    be unreachable, and are called at the address that they listen on. Splicing is disabled: with
    it, HAProxy 2.8 does not notify a gateway when a client disconnects, and uses all CPU time until
    the answer is complete.

    Args:
        page: A file with the error response.
        arrival: Name of the header.
        keep_log: Whether to keep the lines that log every request to the system log.
    """
    config = re.sub(r"(?m)^(frontend prometheus|listen stats)\n(?:[ \t].*\n)*", "", config)
    config = re.sub(r"(?m)^\s+option splice-\w+\n", "", config)
    config = re.sub(r"(?m)^(\s+errorfile 50[234]) .*$", rf"\1 {page}", config)
    config = re.sub(
        r"(?m)^(\s+http-request return status) 404 .*Path .* not found.*$",
        rf"\1 503 errorfile {page}",
        config,
    )
    config = re.sub(
        r"(?m)^(frontend http_frontend\n\s+bind .*\n)",
        rf"\1    http-request set-header {arrival} %[date(0,us)]\n",
        config,
    )
    if not keep_log:
        config = re.sub(r"(?m)^\s+log \S+ local0 info\n", "", config)
    host = re.search(r"(?m)^frontend http_frontend\n\s+bind (\S+):\d+", config)
    own = host[1] if host and host[1] != "*" else None
    return re.sub(r"(?m)(?:^[ \t]+server .*\n)+", lambda found: _servers(found[0], own), config)


def _servers(lines: str, own: str | None) -> str:
    """Changes the lines that list the servers of one backend."""
    local = [line for line in lines.splitlines() if _LOCAL.search(line)]
    gateways = [line for line in local if not line.endswith(" backup")]

    def changed(line: str) -> str:
        if line in local:
            return _LOCAL.sub(rf" {own}\1", line) if own else line
        return f"{line} backup" if gateways and not line.endswith(" backup") else line

    return "".join(f"{changed(line)}\n" for line in lines.splitlines())


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Changes attributes of a module or an object for the duration of the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
