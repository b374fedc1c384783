"""The command `tasc generate`: answers to the rows of a file. It answers nothing itself."""

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
from tasc_jobs.errors import UsageError
from tasc_jobs.progress import Progress, note

if TYPE_CHECKING:
    from tasc_jobs.generate import BatchReport
    from tasc_serve.asked import Guide


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
Temperature = Annotated[float | None, _option("0 takes the likeliest token.", "Sampling")]
TopP = Annotated[float | None, _option("Share of probability drawn from.", "Sampling")]
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
    from tasc_jobs.generate import generate as run
    from tasc_jobs.ray_local import local_ray
    from tasc_serve.asked import Asked
    from tasc_serve.settings import EngineSettings

    guide = _guide(choices, schema, regex)
    asked = Asked(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        guide=guide,
    )
    with open_store(redis_url, data_dir) as url:
        _require_task(url, task, guide)
        note("starting Ray ...")
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
    text = f"{report.rows} rows, {report.errors} errors, block efficiency {efficiency}"
    print_result({**asdict(report), "block_efficiency": efficiency}, text, as_json)


def _require_task(url: str, task: str, guide: "Guide | None") -> None:
    """Say what is wrong before anything slow begins."""
    from tasc_engine.guides import Guides
    from tasc_serve.models import load_tokenizer
    from tasc_store import TaskStore, connect

    record = TaskStore(connect(url)).get(task)
    if guide:
        tokenizer = load_tokenizer(record)
        try:
            Guides(tokenizer, tokenizer.vocab_size).of(guide.spec, record.max_tokens)
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
    if schema:
        text = read_text("schema", schema, MOST_TEXT_BYTES)
        return Guide(GuideSpec("json_schema", text=text), "--schema")
    return Guide(GuideSpec("regex", text=regex), "--regex") if regex else None
