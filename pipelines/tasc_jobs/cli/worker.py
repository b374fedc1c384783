"""The command `tasc worker`: answer the batches of `/v1/batches`."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tasc_jobs.cli.options import (
    AsJson,
    PoolOptions,
    StoreOptions,
    grouped,
)
from tasc_jobs.errors import UsageError
from tasc_runtime.progress import note

if TYPE_CHECKING:
    import redis

    from tasc_jobs.batch.work import JobProgress
    from tasc_jobs.worker.one_batch import Ended
    from tasc_serve.metrics.batch_metrics import BatchMetrics
    from tasc_serve.settings import ServeSettings
    from tasc_store.batches.batch_store import Batch

_EVERY_S: Final = 10.0  # minimum seconds between two progress lines


Once = Annotated[
    bool,
    typer.Option("--once", help="Stop when no batch is waiting.", show_default="wait for more"),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        help="Answer only batches of these tasks, separated by commas.", show_default="all"
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="Settings file of the service. The worker uses the engine, the limits for each line, "
        "and the store in this file; --redis-url or REDIS_URL replaces the store.",
        show_default="default settings",
    ),
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the state of batches. On a disk that workers share, a worker continues "
        "the batches of a stopped worker.",
        show_default="batches in --data-dir",
    ),
]
Poll = Annotated[float, typer.Option(min=0.1, help="Seconds between two checks for a batch.")]
Lease = Annotated[
    float, typer.Option(min=0.5, help="After this many seconds a silent worker loses its batch.")
]
MetricsHost = Annotated[
    str | None,
    typer.Option(
        help="Address or name of this machine that Prometheus can reach.",
        show_default="metrics.host of --config, else the address of the Ray node",
    ),
]
MaxFaults = Annotated[
    int,
    typer.Option(min=1, help="The worker fails after this many engine failures in a row."),
]


@grouped()
def worker(
    *,
    once: Once = False,
    tasks: Tasks = None,
    config: Config = None,
    pool: PoolOptions,
    work_dir: WorkDir = None,
    poll: Poll = 1.0,
    lease: Lease = 10.0,
    max_faults: MaxFaults = 5,
    metrics_host: MetricsHost = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Answer the batches of /v1/batches, one after another, until Ctrl-C.

    A worker that is killed loses nothing: start it again and it continues. If an engine cannot be
    built (for lack of memory, for example), the batch does not fail; the task is left to other
    workers for a while. With --json, each batch that ends is printed as one JSON object.
    """
    from tasc_serve.settings import LimitSettings, load_settings

    named = _names(tasks)
    service = load_settings(config) if config else None
    store = store.or_of(service)
    files_url = store.files_url(service)
    with store.open() as url:
        note(f"store: {store.in_words(url)}")
        folder = work_dir or store.data_dir / "batches"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note("starting Ray ...")
        from tasc_jobs.ray_local import local_ray
        from tasc_jobs.worker.batch_worker import BatchWorker, TaskBackoff
        from tasc_jobs.worker.one_batch import WorkerSettings
        from tasc_runtime.engine_settings import EngineSettings
        from tasc_store import connect
        from tasc_store.batches.files import FileStore

        engine = pool.engine(service.engine if service else EngineSettings())
        limits = service.gateway_limits if service else LimitSettings()
        tasks_of = service.tasks if service else ()
        engines = {t.name: pool.engine(service.engine_of(t)) for t in tasks_of if service}
        settings = WorkerSettings(
            url, folder, files_url, engine, limits, pool.actors, pool.gpus, engines
        )
        shown = Shown(as_json)
        client = connect(url)
        FileStore(client, files_url).require_shared()
        host = _address(metrics_host)
        cluster = local_ray(num_cpus=max(4, pool.actors + 1))
        with cluster, _metrics(client, service, host) as metrics:
            note(
                "waiting for batches; press Ctrl-C to stop"
                if not once
                else "answering waiting batches"
            )
            found = BatchWorker(
                client,
                settings,
                named,
                poll_s=poll,
                lease_s=lease,
                say=note,
                on_progress=shown.on_progress,
                ended=shown.ended,
                metrics=metrics,
                backoff=TaskBackoff(max_faults),
            )
            if once:
                found.run_waiting()
            else:
                found.run_for_ever()


class Shown:
    """Reports batches: lines on stderr, and with ``as_json`` objects on stdout."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._next = 0.0

    def on_progress(self, batch: "Batch", progress: "JobProgress") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            note(
                f"{batch.id}: {progress.report.rows} of {progress.total} lines, "
                f"{progress.report.errors} of them errors, {progress.engines} engines up"
            )

    def ended(self, ended: "Ended") -> None:
        counts, why = ended.counts, f"; {ended.errors[0].message}" if ended.errors else ""
        note(
            f"{ended.batch.id}: {ended.status}, {counts.total} lines, {counts.completed} answered, "
            f"{counts.failed} errors, {ended.seconds:.1f} s{why}"
        )
        if self._as_json:
            content: dict[str, Any] = {
                "batch": ended.batch.id,
                "model": ended.batch.model,
                "status": ended.status,
            }
            content |= {**asdict(counts), "seconds": round(ended.seconds, 3)}
            content["errors"] = [asdict(fault) for fault in ended.errors]
            print(json.dumps(content), flush=True)


def _names(tasks: str | None) -> list[str]:
    names = [name.strip() for name in (tasks or "").split(",")]
    if tasks is not None and not all(names):
        raise UsageError(f"--tasks {tasks!r} has an empty name; separate names by single commas")
    return [name for name in names if name]


def _address(host: str | None) -> str | None:
    """Returns the address of ``host``, because other machines may not resolve its name."""
    if host is None:
        return None
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise UsageError(
            f"--metrics-host {host!r} is neither an address nor a known name ({error}); name an"
            " address of this machine"
        ) from error


@contextmanager
def _metrics(
    client: "redis.Redis", service: "ServeSettings | None", host: str | None
) -> Iterator["BatchMetrics"]:
    """Serves the worker's metrics during the block, on its own port, which `/sd` lists."""
    from prometheus_client import CollectorRegistry

    from tasc_serve.metrics.batch_metrics import BatchMetrics
    from tasc_serve.metrics.discovery import MetricsPort, node_address
    from tasc_serve.settings import MetricsSettings

    found = service.metrics if service else MetricsSettings()
    registry = CollectorRegistry()
    metrics = BatchMetrics(registry)
    host = host or found.host or node_address()
    with MetricsPort(client, registry, host=host, ttl_s=found.ttl_s) as port:
        note(f"metrics: http://{port.target}/metrics")
        yield metrics
