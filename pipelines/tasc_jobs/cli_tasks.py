"""The commands `tasc task create` and `tasc task list`: the register of tasks. No model is run."""

import json
from pathlib import Path
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
from tasc_store import connect

task_app = typer.Typer(help="Register tasks and look at them.", no_args_is_help=True)


@task_app.command("create")
def task_create(
    name: Task,
    model: Annotated[str, typer.Option(help="Folder or Hugging Face name of the base model.")],
    template: Annotated[str, typer.Option(help="Prompt with {input} where the row's input goes.")],
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter, folder or name.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64")] = "float32",
    stop: Annotated[list[str] | None, typer.Option(help="A stop string; repeatable.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Default length limit of an answer.")] = 256,
    corpus: Annotated[str | None, typer.Option(help="Draft from this task's corpus.")] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    r"""Register a task, or a new version of it. In TEMPLATE, \n means a line break."""
    from tasc_store import TaskRecord, TaskStore
    from tasc_text import TaskTokenizer, resolve_folder

    folder = resolve_folder(model, revision, weights=False)
    record = TaskRecord(
        name=name,
        model=_resolved(model),
        fingerprint=TaskTokenizer.from_folder(folder).fingerprint,
        template=template.replace("\\n", "\n"),
        adapter=_resolved(adapter) if adapter else None,
        revision=revision,
        dtype=dtype,
        stop=tuple(stop or ()),
        max_tokens=max_tokens,
        corpus=corpus,
    )
    with open_store(redis_url, data_dir) as url:
        version = TaskStore(connect(url)).put(record)
    print(f"{name} version {version}")


@task_app.command("list")
def task_list(
    redis_url: RedisUrl = None, data_dir: DataDir = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """Show every task and its model."""
    from tasc_store import TaskStore

    with open_store(redis_url, data_dir) as url:
        store = TaskStore(connect(url))
        records = [store.get(name) for name in store.names()]
    text = "\n".join(f"{r.name}\t{r.model}\t{r.adapter or '-'}" for r in records)
    print_result({"tasks": [json.loads(r.to_json()) for r in records]}, text, as_json)


def _resolved(model: str) -> str:
    """A folder's whole path, since others have other working directories; a hub name as it is."""
    from tasc_text import resolve_folder

    folder = resolve_folder(model, weights=False)
    return str(folder) if Path(model).expanduser().is_dir() else model
