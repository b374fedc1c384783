"""The commands under `tasc index`: versions of a task's draft index. They build none."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from tasc_jobs.cli_options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    RedisUrl,
    Task,
    open_store,
    print_result,
)
from tasc_jobs.progress import note
from tasc_store import Artifact, ArtifactStore, TaskStore, connect

index_app = typer.Typer(
    help="Look at the versions of a task's draft index, go back to one.", no_args_is_help=True
)


@index_app.command("list")
def index_list(
    task: Task,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Show every version that the store has of TASK's index."""
    with open_store(redis_url, data_dir) as url:
        store = _store(url, task)
        found = [store.get(version) for version in store.versions()]
        current, rolled_back = store.current(), store.rolled_back()
    now = current.version if current else None
    listed = [
        {
            **asdict(artifact),
            "current": artifact.version == now,
            "rolled_back": artifact.version in rolled_back,
        }
        for artifact in found
    ]
    lines = [_line(artifact, now, rolled_back) for artifact in found]
    text = "\n".join(lines) or f"none yet; run `tasc build-index {task}`"
    print_result({"task": task, "versions": listed}, text, as_json)


@index_app.command("use")
def index_use(
    task: Task,
    version: Annotated[int, typer.Argument(help="A number that `tasc index list` shows.")],
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a version of TASK's index current; services take it within seconds.

    A version that services rolled back stays current when it is named here: it is judged no more.
    """
    with open_store(redis_url, data_dir) as url:
        store = _store(url, task)
        store.announce(version)
        artifact = store.get(version)
        if version in store.rolled_back():
            note(f"version {version} was rolled back before, since it drafted worse")
    text = f"version {version} of the index of {artifact.task} is current"
    print_result(asdict(artifact), text, as_json)


def _store(url: str, task: str) -> ArtifactStore:
    client = connect(url)
    record = TaskStore(client).get(task)
    return ArtifactStore(client, record.corpus_name, record.fingerprint)


def _line(artifact: Artifact, current: int | None, rolled_back: list[int]) -> str:
    version, forecast = artifact.version, artifact.forecast
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(artifact.created_at))
    parts = [
        f"{version:4}",
        made,
        f"{artifact.corpus_rows:,} rows",
        f"{artifact.size_bytes:,} bytes",
        "" if forecast is None else f"{forecast:.3f} tokens per step",
        "current" if version == current else "",
        "rolled back" if version in rolled_back else "",
    ]
    return "  ".join(part for part in parts if part)
