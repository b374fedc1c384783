"""The command `tasc generate`: answers to the rows of a file. It answers nothing itself."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasc_jobs.cli_options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    IdField,
    InputField,
    RedisUrl,
    Task,
    open_store,
    print_result,
)
from tasc_jobs.errors import FileError, UsageError
from tasc_jobs.progress import Progress, note

if TYPE_CHECKING:
    from tasc_jobs.generate import BatchReport
    from tasc_serve.asked import Asked, Guide
    from tasc_store import TaskRecord


def _option(help_: str, panel: str) -> Any:
    return typer.Option(help=help_, show_default="the task's", rich_help_panel=panel)


Actors = Annotated[int, typer.Option(min=1, help="Engines in the pool.")]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs of each engine.")]
Rows = Annotated[int, typer.Option(min=1, help="b, rows an engine decodes together.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=8, help="Prompt + answer, tokens.", show_default="up to 1024")
]
Choices = Annotated[
    Path | None,
    _option("File of labels, one a line or a .json list: each answer is one.", "Answers"),
]
Schema = Annotated[Path | None, _option("File with the JSON schema of every answer.", "Answers")]
Regex = Annotated[str | None, _option("Expression that a whole answer matches.", "Answers")]
Adapter = Annotated[
    str | None,
    typer.Option(help="Which of the task's adapters answers.", show_default="its first"),
]
Temperature = Annotated[float | None, _option("0 takes the likeliest token, to 100.", "Sampling")]
TopP = Annotated[
    float | None, _option("Above 0, to 1: share of probability drawn from.", "Sampling")
]
TopK = Annotated[int | None, _option("Likeliest tokens drawn from; 0: all.", "Sampling")]
Seed = Annotated[
    int, typer.Option(min=0, help="Same seed, same answers.", rich_help_panel="Sampling")
]


def generate(
    task: Task,
    source: Annotated[Path, typer.Option("--input", help=".jsonl, .jsonl.gz or .parquet")],
    output: Annotated[Path, typer.Option(help="JSON lines, one per input row, in order.")],
    actors: Actors = 1,
    gpus: Gpus = 0.0,
    rows: Rows = 8,
    max_model_len: MaxModelLen = None,
    adapter: Adapter = None,
    draft: Annotated[bool, typer.Option(help="Whether to draft; answers are the same.")] = True,
    choices: Choices = None,
    schema: Schema = None,
    regex: Regex = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    input_field: InputField = "input",
    id_field: IdField = "id",
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Answer every row of a file with the engines of a Ray Data actor pool.

    An answer has its row's id as a string; a row without one gives the number of its line in the
    file, from 1 and blank lines counted, or of its row in a Parquet file.
    """
    _require_files(source, output, input_field)
    from tasc_serve.asked import Asked

    guide = _guide(choices, schema, regex)
    asked = Asked(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, guide=guide, adapter=adapter
    )
    with open_store(redis_url, data_dir) as url:
        _require_task(url, task, asked)
        note("starting Ray ...")
        from tasc_jobs.generate import generate as run
        from tasc_jobs.ray_local import local_ray
        from tasc_serve.settings import EngineSettings

        with local_ray(), Progress("write", None) as bar:
            report = run(
                url,
                task,
                source,
                output,
                engine=EngineSettings(rows=rows, max_model_len=max_model_len),
                actors=actors,
                actor_gpus=gpus,
                draft=draft,
                asked=asked,
                input_field=input_field,
                id_field=id_field,
                progress=bar.advance,
            )
    _print(report, as_json)


def _print(report: "BatchReport", as_json: bool) -> None:
    efficiency = round(report.block_efficiency, 3)
    first = f" (first: {' '.join(report.first_error.split())})" if report.first_error else ""
    text = f"{report.rows} rows, {report.errors} errors{first}, block efficiency {efficiency}"
    print_result({**asdict(report), "block_efficiency": efficiency}, text, as_json)


def _require_files(source: Path, output: Path, input_field: str) -> None:
    from tasc_jobs.rows import check_file

    try:
        check_file(source, (input_field,))
    except FileError as error:
        raise UsageError(f"--input: {error}") from error
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it")
    if not output.parent.is_dir():
        raise UsageError(f"--output: there is no folder {output.parent}; make it or name another")
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output: {output.parent} may not be written to; name another folder")


def _require_task(url: str, task: str, asked: "Asked") -> None:
    """Say what is wrong before anything slow begins."""
    from tasc_jobs.tasks.values import option
    from tasc_store import TaskStore, connect

    record = TaskStore(connect(url)).get(task)
    try:
        asked.sampling(record.sampling)
        asked.adapter_of(record)
    except ValueError as error:
        name, blank, rest = str(error).partition(" ")
        raise UsageError(f"{option(name)}{blank}{rest}") from error
    if asked.guide:
        _require_guide(record, asked.guide)


def _require_guide(record: "TaskRecord", guide: "Guide") -> None:
    from tasc_engine.guides import Guides
    from tasc_jobs.tasks.base_model import BaseModel
    from tasc_serve.models import load_tokenizer

    tokenizer = load_tokenizer(record)
    vocab_size = BaseModel.open(record.model, record.revision).vocab_size
    try:
        Guides(tokenizer, vocab_size).of(guide.spec, record.max_tokens)
    except ValueError as error:
        raise UsageError(f"{guide.field}: {error}") from error


def _guide(choices: Path | None, schema: Path | None, regex: str | None) -> "Guide | None":
    """What the options say an answer may be."""
    from tasc_engine import GuideSpec
    from tasc_jobs.tasks.given import labels_of, read_text
    from tasc_serve.asked import Guide
    from tasc_store.answer_forms import MOST_TEXT_BYTES

    given = {"--choices": choices, "--schema": schema, "--regex": regex}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} say what an answer may be; give one of them")
    if choices:
        return Guide(GuideSpec("choice", choices=labels_of(choices)), "--choices")
    text = regex if schema is None else read_text("schema", schema, MOST_TEXT_BYTES)
    if text is None:
        return None
    if not text:
        raise UsageError(f"{named[0]} is empty; leave it out for answers of any form")
    return Guide(GuideSpec("json_schema" if schema else "regex", text=text), named[0])
