"""The command `tasc generate`: answers to the rows of a file."""

import os
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Gpus,
    IdField,
    InputField,
    MaxModelLen,
    StoreOptions,
    Task,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.errors import UsageError
from tasc_runtime.errors import FileError
from tasc_runtime.progress import note, show_progress


def _option(help_: str, panel: str) -> Any:
    return typer.Option(help=help_, show_default="the task's", rich_help_panel=panel)


Actors = Annotated[int, typer.Option(min=1, help="Number of engines.")]
Rows = Annotated[
    int, typer.Option(min=1, help="b, the number of rows that an engine decodes together.")
]
Stall = Annotated[
    float, typer.Option(min=1, help="The job fails after this many seconds without a finished row.")
]
Choices = Annotated[
    Path | None,
    _option("File of labels, one per line or a .json list; each answer is one.", "Answers"),
]
Schema = Annotated[Path | None, _option("File with the JSON schema of every answer.", "Answers")]
Regex = Annotated[
    str | None, _option("Regular expression that the whole answer matches.", "Answers")
]
Adapter = Annotated[
    str | None, typer.Option(help="Name of the adapter that answers.", show_default="its first")
]
Temperature = Annotated[
    float | None, _option("0 to 100; 0 takes the most likely token.", "Sampling")
]
TopP = Annotated[
    float | None, _option("Above 0, to 1: share of probability to sample from.", "Sampling")
]
TopK = Annotated[
    int | None, _option("Number of likeliest tokens to sample from; 0: all.", "Sampling")
]
Seed = Annotated[
    int,
    typer.Option(min=0, help="The same seed gives the same answers.", rich_help_panel="Sampling"),
]
Input = Annotated[
    list[str],
    typer.Option(
        "--input",
        help=".jsonl, .jsonl.gz or .parquet, a folder of them, or redis:TASK for the inputs of "
        "that task's corpus; repeatable for files and folders.",
    ),
]
Output = Annotated[
    Path, typer.Option(help="One row per good input row, in order: .parquet, else JSON lines.")
]
Reject = Annotated[
    Path | None,
    typer.Option(help="File for rows without an answer.", show_default="OUTPUT.rejected.jsonl"),
]
MaxErrors = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum number of rows without an answer; with more the job fails.",
        show_default="any number",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Time 20 rows with and without drafts, and write nothing.",
        show_default="off",
    ),
]
Restart = Annotated[
    bool,
    typer.Option("--restart", help="Discard the work of an earlier start.", show_default="off"),
]
Draft = Annotated[bool, typer.Option(help="Whether to draft; the answers are the same.")]


if TYPE_CHECKING:
    from tasc_jobs.batch.inputs import Source
    from tasc_jobs.batch.work import JobReport
    from tasc_runtime.sampling_options import AnswerGuide, SamplingOptions
    from tasc_store import TaskRecord


@grouped()
def generate(
    *,
    task: Task,
    source: Input,
    output: Output,
    reject: Reject = None,
    max_errors: MaxErrors = None,
    dry_run: DryRun = False,
    restart: Restart = False,
    actors: Actors = 1,
    gpus: Gpus = 0.0,
    rows: Rows = 8,
    max_model_len: MaxModelLen = None,
    stall_timeout: Stall = 600.0,
    adapter: Adapter = None,
    draft: Draft = True,
    choices: Choices = None,
    schema: Schema = None,
    regex: Regex = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    input_field: InputField = "input",
    id_field: IdField = "id",
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Answer every row of the input with a pool of engines.

    An answer has the id of its row as a string. If a row has no id, its number in the file is used
    (lines count from 1, with blank ones), after the file's name if there are several files. Of rows
    with the same id, only the first is answered and the others are rejected.

    A job that was stopped or killed continues when the same command is run again; its state is in
    the folder OUTPUT.job. A changed input or other settings are refused without --restart.
    """
    given = _source(source, input_field, id_field, output, reject)
    require_files(choices, schema)
    with store.open(task) as url:
        from tasc_runtime.engine_settings import EngineSettings
        from tasc_runtime.sampling_options import SamplingOptions

        guide = _guide(choices, schema, regex)
        asked = SamplingOptions(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            guide=guide,
            adapter=adapter,
        )
        job: dict[str, Any] = {
            "engine": EngineSettings(rows=rows, max_model_len=max_model_len),
            "asked": asked,
            "actors": actors,
            "actor_gpus": gpus,
            "max_errors": max_errors,
            "restart": restart,
            "stall_s": stall_timeout,
        }
        _require_task(url, task, asked)
        with _ray_for(actors):
            if dry_run:
                _preview((url, task, given, output), job, as_json)
            else:
                _answer((url, task, given, output), reject, {**job, "draft": draft}, as_json)


def _ray_for(actors: int) -> AbstractContextManager[None]:
    note("starting Ray ...")
    from tasc_jobs.ray_local import local_ray

    return local_ray(num_cpus=max(4, actors + 1))


_Job: TypeAlias = tuple[str, str, "Source", Path]


def _preview(which: _Job, job: dict[str, Any], as_json: bool) -> None:
    from tasc_jobs.batch.generate import dry_run, preview_as_json, preview_in_words

    found, total = dry_run(*which, **job)
    engines = job["actors"]
    told = preview_in_words(found, total, engines)
    print_result(preview_as_json(found, total, engines), told, as_json)


def _answer(which: _Job, reject: Path | None, job: dict[str, Any], as_json: bool) -> None:
    from tasc_jobs.batch.generate import BatchProgress
    from tasc_jobs.batch.generate import generate as run
    from tasc_jobs.batch.inputs import reject_file

    rejects = reject or reject_file(which[-1])
    with show_progress("answer", None) as bar:
        report = run(*which, reject=rejects, progress=BatchProgress(bar), **job)
    _print(report, rejects, as_json)


def _print(report: "JobReport", rejects: Path, as_json: bool) -> None:
    efficiency = round(report.block_efficiency, 3)
    first = f" (first: {' '.join(report.first_error.split())})" if report.first_error else ""
    where = str(rejects) if report.errors else None
    text = f"{report.rows} rows, {report.errors} errors{first}, block efficiency {efficiency}"
    if report.resumed:
        text += f"; {report.resumed} rows were done before"
    if where:
        text += f"; see {where}"
    content = {**asdict(report), "block_efficiency": efficiency, "reject_file": where}
    print_result(content, text, as_json)


def _source(
    given: list[str], input_field: str, id_field: str, output: Path, reject: Path | None
) -> "Source":
    """Say what is wrong before anything slow begins."""
    from tasc_jobs.batch.inputs import Source, check_files, check_output, reject_file

    source = Source(tuple(given), input_field, id_field)
    try:
        source.check()
        check_files(source.files, input_field, (output, reject or reject_file(output)))
    except FileError as error:
        raise UsageError(f"--input: {error}") from error
    try:
        check_output(output)
    except FileError as error:
        raise UsageError(f"--output: {error}") from error
    if reject is not None and (reject.is_dir() or not reject.parent.is_dir()):
        raise UsageError(f"--reject: {reject} is a folder, or in one that is not there")
    if reject is not None and reject.resolve() == output.resolve():
        raise UsageError(f"--reject: {reject} is the output too; name another")
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output: {output.parent} may not be written to; name another folder")
    return source


def _require_task(url: str, task: str, asked: "SamplingOptions") -> None:
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


def _require_guide(record: "TaskRecord", guide: "AnswerGuide") -> None:
    from tasc_engine.guided import Guides
    from tasc_jobs.tasks.model_folders import BaseModel
    from tasc_runtime.models import load_tokenizer

    tokenizer = load_tokenizer(record)
    vocab_size = BaseModel.open(record.model, record.revision).vocab_size
    try:
        Guides(tokenizer, vocab_size).of(guide.spec, record.max_tokens)
    except ValueError as error:
        raise UsageError(f"{guide.field}: {error}") from error


def _guide(choices: Path | None, schema: Path | None, regex: str | None) -> "AnswerGuide | None":
    """What the options say an answer may be."""
    from tasc_engine import GuideSpec
    from tasc_engine.request import GuideKind
    from tasc_jobs.tasks.values import labels_of, read_text
    from tasc_runtime.sampling_options import AnswerGuide
    from tasc_store.tasks.record import MOST_TEXT_BYTES

    given = {"--choices": choices, "--schema": schema, "--regex": regex}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} say what an answer may be; give one of them")
    labels = labels_of(choices) if choices else ()
    text = regex if schema is None else read_text("schema", schema, MOST_TEXT_BYTES)
    if not named:
        return None
    if not (labels or text):
        raise UsageError(f"{named[0]} is empty; leave it out for answers of any form")
    kind: GuideKind = "choice" if labels else "json_schema" if schema else "regex"
    try:
        return AnswerGuide(GuideSpec(kind, labels, text or ""), named[0])
    except ValueError as error:
        raise UsageError(f"{named[0]}: {error}") from error
