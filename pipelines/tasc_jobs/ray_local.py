"""A Ray for one command on one machine, or the cluster that RAY_ADDRESS names.

The local one talks over loopback only, sends no usage reports, and leaves no process and no folder.
"""

import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private import worker as ray_worker

from tasc_jobs.errors import RaySetupError

NO_PROGRESS_TIMEOUT_S = 90
# A socket's path may have 107 bytes: 18 are for our folder below this one, up to 75 for what Ray or
# its HAProxy put below that.
_LONGEST_PARENT = 107 - 18 - 75
# Ray gives its workers niceness 15, so that whatever else runs on the machine starves a replica.
# Torch takes huge pages only when it is asked to: products of weights in them run a tenth faster.
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_worker_niceness": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}
# Every Serve replica listens on all interfaces for calls that it unpickles: the token is for those.
# A process keeps one for good, since Ray reads it once; and Ray looks at the mode again after its
# import only where it is unset.
_LOOPBACK: dict[str, str | None] = {
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    "RAY_AUTH_MODE": None,
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
}

_print_it = ray_worker.print_to_stdstream


@contextmanager
def local_ray(
    num_cpus: int = 4,
    object_store_mb: int = 256,
    environment: Callable[[Path], Mapping[str, str]] = lambda folder: {},
) -> Iterator[None]:
    """Ray is running inside the block.

    A Ray already running in this process is used and left as it is; with RAY_ADDRESS set this
    process joins that cluster, where tasc-serve must be installed on every node. Ray Data shows no
    progress bars, and gives up after 90 s without progress instead of half an hour.

    Args:
        num_cpus: Logical CPUs of a local Ray: how many tasks run at the same time.
        object_store_mb: Its shared memory in MiB.
        environment: What its processes are given besides, by the folder that it has for its files.

    Raises:
        RaySetupError: The local Ray does not start, or does not keep to loopback.
        ConnectionError: Nobody answers at RAY_ADDRESS.
    """
    if ray.is_initialized():
        yield
        return
    with ExitStack() as undo:
        undo.enter_context(_changed(ray_worker, print_to_stdstream=_print_error))
        undo.enter_context(_environment(_ALWAYS))
        on_sigterm = signal.getsignal(signal.SIGTERM)
        if os.environ.get("RAY_ADDRESS"):
            undo.callback(ray.shutdown)
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
        else:
            undo.enter_context(_own_cluster(num_cpus, object_store_mb, environment))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray put its own in its place
        _quiet_data(undo)
        yield


def running_ray() -> str | None:
    """Return the address of what ``ray start`` began on this machine, while it runs."""
    address: str | None = services.find_bootstrap_address(None)
    return address if address in services.find_gcs_addresses() else None


def in_words(num_cpus: int, joined: str | None, running: str | None) -> str:
    """Say which Ray `local_ray` uses.

    Args:
        joined: What RAY_ADDRESS has.
        running: What `running_ray` returned before.
    """
    if joined:
        return f"joined the cluster {joined}, as RAY_ADDRESS says"
    own = f"started one for this service alone, with {num_cpus} logical CPUs"
    if running is None:
        return own
    return f"{own}; that at {running} is left alone (RAY_ADDRESS={running} joins it)"


def require_ray() -> None:
    """Raise RaySetupError unless a Ray is running in this process.

    Ray Data would start one by itself, which listens on every interface.
    """
    if not ray.is_initialized():
        raise RaySetupError("no Ray is running in this process; start one with local_ray()")


def _print_error(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Print on stderr what happens to workers: stdout is for a command's result."""
    _print_it({**data, "is_err": True}, ignore_prefix)


def _quiet_data(undo: ExitStack) -> None:
    from ray.data import DataContext  # here, since it takes two seconds

    log = logging.getLogger("ray.data")
    undo.callback(log.setLevel, log.level)
    log.setLevel(logging.ERROR)
    undo.enter_context(
        _changed(
            DataContext.get_current(),
            enable_progress_bars=False,
            execution_no_progress_timeout_s=NO_PROGRESS_TIMEOUT_S,
        )
    )


@contextmanager
def _own_cluster(
    num_cpus: int, object_store_mb: int, environment: Callable[[Path], Mapping[str, str]]
) -> Iterator[None]:
    with ExitStack() as undo:
        folder = undo.enter_context(_temporary_folder())
        undo.enter_context(_environment({**environment(Path(folder)), **_LOOPBACK}))
        # Ray read the variable when it was imported; only its child processes will read it anew.
        undo.enter_context(_changed(ray_constants, ENABLE_RAY_CLUSTER=False))
        try:
            _start(num_cpus, object_store_mb, folder)
            address = ray.util.get_node_ip_address()
            if address != "127.0.0.1":
                raise RaySetupError(
                    f"Ray listens on {address}, not on 127.0.0.1; start a"
                    " cluster of your own and set RAY_ADDRESS"
                )
            yield
        finally:
            ray.shutdown(wait_for_processes=True)


def _start(num_cpus: int, object_store_mb: int, folder: str) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_mb << 20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
    except Exception as error:  # Ray has no class for a start that takes too long
        raise RaySetupError(
            f"Ray did not start: {str(error).rstrip('.')}; if the machine is busy, run the command "
            "again when it is less so"
        ) from error


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) <= _LONGEST_PARENT
    parent = usual if fits else "/tmp"  # noqa: S108 - the folder made there is ours alone
    # A worker that dies late may still write its log while the folder goes.
    return tempfile.TemporaryDirectory(prefix="tasc-ray-", dir=parent, ignore_cleanup_errors=True)


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables for this process and the ones it starts; None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or an object have other values inside the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
