"""Options that several commands share, the store they name, and how results are printed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tasc_store import EmbeddedRedis, connect, redact

Template = Annotated[
    str | None,
    typer.Option(help=r"Prompt with {input}; \n is a line break.", show_default="the task's"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of an answer.", show_default="the task's, or 256"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=8, help="Tokens of prompt and answer.", show_default="1024, or what the model has"
    ),
]
BatchRows = Annotated[int, typer.Option(min=1, help="Rows of one step.")]
MicroRows = Annotated[
    int, typer.Option(min=1, help="Rows at the same time; fewer need less memory.")
]
CheckpointS = Annotated[float, typer.Option(min=1, help="Seconds between two checkpoints.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 ...")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs of each engine.")]


DEFAULT_DATA_DIR = Path.home() / ".local" / "share" / "tasc-serve"

Task = Annotated[str, typer.Argument(help="Name of the task.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="REDIS_URL",
        help="Redis of version 6.2 or later.",
        show_default="a server of our own on --data-dir",
    ),
]
DataDir = Annotated[
    Path,
    typer.Option(envvar="TASC_DATA_DIR", help="Where our own Redis server keeps its data."),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object instead of text.", show_default="off"),
]
InputField = Annotated[str, typer.Option(help="Field with the task's input.")]
OutputField = Annotated[str, typer.Option(help="Field with the task's output.")]
IdField = Annotated[str, typer.Option(help="Field with the row's id.")]


@contextmanager
def open_store(redis_url: str | None, data_dir: Path) -> Iterator[str]:
    """The URL given, checked, or that of a server on ``data_dir`` which lives for the block."""
    if redis_url:
        connect(redis_url).close()  # say what is wrong with it before anything slow begins
        yield redis_url
        return
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with EmbeddedRedis.start(data_dir) as server:
        yield server.url


def store_in_words(given: str | None, url: str, data_dir: Path) -> str:
    """Which store is used, and how other commands reach one of our own; no login is shown."""
    if given:
        return redact(url)
    return f"our own Redis on {data_dir}; other commands reach it meanwhile with REDIS_URL={url}"


def print_result(content: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(content) if as_json else text)
