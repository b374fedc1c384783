"""The commands under `tasc index`, and `tasc refresh`: versions of a task's draft index."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasc_jobs.cli.options import AsJson, StoreOptions, Task, grouped, print_result
from tasc_jobs.errors import JobError, UsageError, in_short, known_errors, require_writable
from tasc_jobs.hints import command
from tasc_runtime.progress import note
from tasc_store import Artifact, ArtifactStore, TaskStore, connect

if TYPE_CHECKING:
    import redis


@grouped()
def refresh(
    *,
    task: Task,
    every: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Repeat at this interval in seconds, even if a run fails.",
            show_default="once",
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, max=10, help="Minimum relative rise of tokens per step.")
    ] = 0.01,
    min_rows: Annotated[
        int, typer.Option(min=100, help="Minimum number of new rows in the corpus.")
    ] = 200,
    keep: Annotated[
        int, typer.Option(min=2, help="Number of older versions to keep in the store.")
    ] = 5,
    parallelism: Annotated[
        int | None,
        typer.Option(min=1, help="As in `tasc build-index`.", show_default="by rows and CPUs"),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1, help="As in `tasc build-index`.", show_default="no cap")
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Move answers that services collected for TASK into its corpus, and renew its index.

    The new index becomes current only if it drafts better for rows that neither index has seen.
    Services collect answers of tasks whose settings have `collect: {sample_rate: 0.1}`.
    """
    judged = 0
    with store.open(None if every else task) as url:  # with --every the task may be created later
        from tasc_jobs.tuning.refresh import STAGES, RefreshOptions
        from tasc_jobs.tuning.refresh import refresh as run
        from tasc_runtime.progress import Stages

        options = RefreshOptions(margin, min_rows, keep, parallelism, max_bytes)
        while True:
            try:
                with Stages(f"refresh {task}", STAGES) as stages:
                    done = run(url, task, options, stages, judged=judged)
                if done.judged_rows:
                    judged = done.corpus_rows
                print_result(asdict(done), done.in_words, as_json)
            except known_errors() as error:
                if every is None:
                    raise
                note(f"refresh {task} failed, next try in {every:g} s: {in_short(error)}")
            if every is None:
                return
            time.sleep(every)


index_app = typer.Typer(
    help="List the versions of a task's draft index, go back to one, or write one to a folder.",
    no_args_is_help=True,
)


@index_app.command("list", epilog="tasc index list tickets")
@grouped()
def index_list(*, task: Task, store: StoreOptions, as_json: AsJson = False) -> None:
    """List the stored versions of TASK's index."""
    with store.open() as url, connect(url) as client:
        indexes = _indexes(client, task)
        found = [indexes.get(version) for version in indexes.versions()]
        current = indexes.current()
    now = current.version if current else None
    listed = [{**asdict(artifact), "current": artifact.version == now} for artifact in found]
    lines = [_line(artifact, now) for artifact in found]
    text = "\n".join(lines) or f"none yet; run `{command('build-index', task)}`"
    print_result({"task": task, "versions": listed}, text, as_json)


@index_app.command("use", epilog="tasc index use tickets 3")
@grouped()
def index_use(
    *,
    task: Task,
    version: Annotated[int, typer.Argument(help="Version number, as `tasc index list` shows it.")],
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Make a version of TASK's index current; services take it within seconds."""
    with store.open() as url, connect(url) as client:
        indexes = _indexes(client, task)
        indexes.announce(version)
        artifact = indexes.get(version)
    text = f"version {version} of the index of {artifact.task} is current"
    print_result(asdict(artifact), text, as_json)


@index_app.command(
    "export",
    epilog="tasc index export tickets --to ./tickets-index\n\n"
    "tasc index export tickets --to ./tickets-index --version 3",
)
@grouped()
def index_export(
    *,
    task: Task,
    to: Annotated[Path, typer.Option(help="Folder for index.tasc; it is created if needed.")],
    version: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Version number, as `tasc index list` shows it.",
            show_default="the current version",
        ),
    ] = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Write the current version of TASK's index, or another one, to a folder.

    Other engines draft from such a folder without Redis. The file is checked before it replaces
    the one of an earlier export.
    """
    with store.open() as url, connect(url) as client:
        indexes = _indexes(client, task)
        artifact = indexes.current() if version is None else indexes.get(version)
        if artifact is None:
            raise JobError(
                f"task {task} has no current index; run `{command('build-index', task)}`"
            )
        from tasc_jobs.index.publish import export  # imports numba

        path = export(indexes, artifact, _made(to))
    text = (
        f"version {artifact.version} of the index of {artifact.task} is in {path} "
        f"({artifact.size_bytes:,} bytes)"
    )
    print_result({**asdict(artifact), "path": str(path)}, text, as_json)


def _made(folder: Path) -> Path:
    folder = folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--to is {folder}, where no folder can be made ({error.strerror}); name another folder"
        ) from error
    require_writable("--to", folder / "index.tasc")
    return folder


def _indexes(client: "redis.Redis", task: str) -> ArtifactStore:
    record = TaskStore(client).get(task)
    return ArtifactStore(client, record.corpus_name, record.fingerprint)


def _line(artifact: Artifact, current: int | None) -> str:
    version, forecast = artifact.version, artifact.forecast
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(artifact.created_at))
    parts = [
        f"{version:4}",
        made,
        artifact.rows_in_words,
        f"{artifact.size_bytes:,} bytes",
        "" if forecast is None else f"{forecast:.3f} tokens per step",
        "current" if version == current else "",
    ]
    return "  ".join(part for part in parts if part)
