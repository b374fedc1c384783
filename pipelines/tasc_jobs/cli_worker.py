"""The command `tasc worker`: answers batches asked for over HTTP. It answers nothing itself."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tasc_jobs.cli_options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    RedisUrl,
    open_store,
    store_in_words,
)
from tasc_jobs.errors import UsageError
from tasc_jobs.progress import note

if TYPE_CHECKING:
    from tasc_jobs.batch import JobProgress
    from tasc_jobs.worker.one_batch import Ended, WorkerSettings
    from tasc_store.batches import Batch

_EVERY_S: Final = 10.0  # at least, between two lines on one batch


Once = Annotated[
    bool, typer.Option("--once", help="End when no batch waits.", show_default="wait for more")
]
Tasks = Annotated[
    str | None, typer.Option(help="Only batches of these, by commas.", show_default="of any")
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="The service's settings file: its limits hold for lines too.",
        show_default="default limits",
    ),
]
Actors = Annotated[int, typer.Option(min=1, help="Engines that work on a batch.")]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs of each engine.")]
Rows = Annotated[
    int | None, typer.Option(min=1, help="b, rows an engine decodes together.", show_default="8")
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=8, help="Prompt + answer, tokens.", show_default="up to 1024")
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        help="Where what is done of a batch is kept; on disks that workers share, each of them "
        "goes on where another was ended.",
        show_default="batches in --data-dir",
    ),
]
Poll = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks for a batch.")]
Lease = Annotated[
    float,
    typer.Option(min=0.5, help="A batch whose worker is silent for so many s is another's."),
]


def worker(
    once: Once = False,
    tasks: Tasks = None,
    config: Config = None,
    actors: Actors = 1,
    gpus: Gpus = 0.0,
    rows: Rows = None,
    max_model_len: MaxModelLen = None,
    work_dir: WorkDir = None,
    poll: Poll = 1.0,
    lease: Lease = 10.0,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Answer the batches of /v1/batches, one after another, until Ctrl-C.

    One killed at any moment loses nothing: started again it does what is missing. With --json each
    batch that ends is an object on a line of stdout.
    """
    named = _names(tasks)
    with open_store(redis_url, data_dir) as url:
        note(f"store: {store_in_words(redis_url, url, data_dir)}")
        folder = work_dir or data_dir / "batches"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note("starting Ray ...")
        from tasc_jobs.ray_local import local_ray
        from tasc_jobs.worker.taking import BatchWorker
        from tasc_store import connect

        settings = _settings(url, folder, config, actors, gpus, rows, max_model_len)
        shown = Shown(as_json)
        with local_ray(num_cpus=max(4, actors + 1)):
            note("waiting for batches; Ctrl-C ends" if not once else "answering what waits")
            client = connect(url)
            found = BatchWorker(
                client, settings, named, poll, lease,
                say=note, told=shown.told, ended=shown.ended,
            )  # fmt: skip
            if once:
                found.run_waiting()
            else:
                found.run_for_ever()


class Shown:
    """What people see of batches: lines on stderr, and with ``as_json`` objects on stdout."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._next = 0.0

    def told(self, batch: "Batch", progress: "JobProgress") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            note(
                f"{batch.id}: {progress.done} of {progress.total} lines, {progress.errors} of them "
                f"errors, {progress.engines} engines up"
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
        raise UsageError(f"--tasks {tasks!r} has an empty name; write names with commas between")
    return [name for name in names if name]


def _settings(
    url: str,
    folder: Path,
    config: Path | None,
    actors: int,
    gpus: float,
    rows: int | None,
    max_model_len: int | None,
) -> "WorkerSettings":
    from tasc_jobs.worker.one_batch import WorkerSettings
    from tasc_serve.settings import EngineSettings, LimitSettings, load_settings

    service = load_settings(config) if config else None
    engine = service.engine if service else EngineSettings()
    given = {"rows": rows, "max_model_len": max_model_len}
    engine = engine.model_copy(update={k: v for k, v in given.items() if v is not None})
    limits = service.gateway_limits if service else LimitSettings()
    return WorkerSettings(url, folder, engine, limits, actors, gpus)
