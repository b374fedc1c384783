"""A local Ray for one command, or the cluster at RAY_ADDRESS.

The local Ray uses the loopback interface only, sends no usage reports, and leaves no processes or
folders behind.
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

import ray

from tasc_jobs.errors import RaySetupError
from tasc_runtime.ray_private import changed, loopback_only, messages_to_stderr

NO_PROGRESS_TIMEOUT_S = 90
# The path of a socket may have 107 bytes: the name of our temporary folder takes 18, and the paths
# that Ray or its HAProxy create in that folder take up to 75.
_LONGEST_PARENT = 107 - 18 - 75
# With Ray's default niceness of 15, any other program on the machine could starve a replica. Torch
# uses huge pages only if THP_MEM_ALLOC_ENABLE is set; it multiplies weights in them a tenth faster.
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_worker_niceness": "0",
    "THP_MEM_ALLOC_ENABLE": "1",
}
# Every Serve replica listens on all interfaces for calls that it unpickles; the token protects it.
# Ray reads the token once, so a process cannot change its token. After Ray's import, `ray.init` can
# enable the token only if RAY_AUTH_MODE is unset.
_LOOPBACK: dict[str, str | None] = {
    "RAY_AUTH_MODE": None,
    "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32),
}


@contextmanager
def local_ray(
    num_cpus: int = 4,
    object_store_mb: int = 256,
    environment: Callable[[Path], Mapping[str, str]] = lambda folder: {},
) -> Iterator[None]:
    """Run Ray for the duration of the block.

    A Ray that already runs in this process is used and not changed. If RAY_ADDRESS is set, this
    process joins that cluster; tasc-serve must be installed on all its nodes. Ray Data shows no
    progress bars, and fails after 90 s without progress instead of half an hour.

    Args:
        num_cpus: Logical CPUs of a local Ray, which limit the number of concurrent tasks.
        object_store_mb: Shared memory of a local Ray in MiB.
        environment: Called with the folder of a local Ray's files; returns further environment
            variables of that Ray's processes.

    Raises:
        RaySetupError: The local Ray does not start, or uses other interfaces than loopback.
        ConnectionError: There is no response at RAY_ADDRESS.
    """
    if ray.is_initialized():
        yield
        return
    with ExitStack() as undo:
        undo.enter_context(messages_to_stderr())
        undo.enter_context(_environment(_ALWAYS))
        on_sigterm = signal.getsignal(signal.SIGTERM)
        if os.environ.get("RAY_ADDRESS"):
            undo.callback(ray.shutdown)
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
        else:
            undo.enter_context(_own_cluster(num_cpus, object_store_mb, environment))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray replaced the handler
        _quiet_data(undo)
        yield


def in_words(num_cpus: int, joined: str | None, running: str | None) -> str:
    """Describes the Ray that `local_ray` uses.

    Args:
        joined: The value of RAY_ADDRESS.
        running: The return value of `ray_private.running_ray` before the start.
    """
    if joined:
        return f"joined the cluster {joined}, as RAY_ADDRESS says"
    own = f"started one for this service alone, with {num_cpus} logical CPUs"
    if running is None:
        return own
    return f"{own}; the Ray at {running} is not used (RAY_ADDRESS={running} joins it)"


def require_ray() -> None:
    """Raise RaySetupError unless Ray is running in this process.

    Otherwise Ray Data would start a Ray that listens on every interface.
    """
    if not ray.is_initialized():
        raise RaySetupError("no Ray is running in this process; start one with local_ray()")


def _quiet_data(undo: ExitStack) -> None:
    from ray.data import DataContext  # imported here because it takes two seconds

    log = logging.getLogger("ray.data")
    undo.callback(log.setLevel, log.level)
    log.setLevel(logging.ERROR)
    undo.enter_context(
        changed(
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
        loopback = {**_LOOPBACK, **undo.enter_context(loopback_only())}
        undo.enter_context(_environment({**environment(Path(folder)), **loopback}))
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
    except Exception as error:  # Ray has no exception class for a start that takes too long
        raise RaySetupError(
            f"Ray did not start: {str(error).rstrip('.')}; if the machine is busy, run the command "
            "again later"
        ) from error


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) <= _LONGEST_PARENT
    parent = usual if fits else "/tmp"  # noqa: S108 - the folder made there is ours alone
    # A worker that exits late may still write its log while the folder is deleted.
    return tempfile.TemporaryDirectory(prefix="tasc-ray-", dir=parent, ignore_cleanup_errors=True)


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables for this process and its child processes; None unsets a variable."""
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
