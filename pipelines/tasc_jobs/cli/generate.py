"""The command `tasc generate`: answers to the rows of a file."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tasc_jobs.cli.options import (
    AsJson,
    IdField,
    InputField,
    PoolOptions,
    Report,
    StoreOptions,
    Task,
    check_report,
    grouped,
    print_result,
    require_files,
)
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.options import AnswerOptions
from tasc_protocol.request import MOST_LOGPROBS
from tasc_runtime.progress import note, show_progress

Stall = Annotated[
    float, typer.Option(min=1, help="The job fails after this many seconds without a finished row.")
]
Adapter = Annotated[
    str | None, typer.Option(help="Name of the adapter that answers.", show_default="the first")
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
        "that task's corpus; repeatable for files and folders. For a folder as the output also "
        "URLs such as s3://bucket/rows/, and patterns such as 'rows/*.parquet'.",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        help="Answers in the order of the rows: .parquet, or else JSON lines. A folder, or a path "
        "that ends with /, or a URL such as s3://bucket/answers/ gets parts, which the engines "
        "read and write themselves."
    ),
]
Format = Annotated[
    Literal["jsonl", "parquet"] | None,
    typer.Option("--format", help="Format of parts.", show_default="that of the input"),
]
PartBytes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Approximate size of the input of a part, in bytes.", show_default="1048576"
    ),
]
Reject = Annotated[
    Path | None,
    typer.Option(
        help="File for rows without an answer; for parts, the folder OUTPUT/_rejected.",
        show_default="OUTPUT.rejected.jsonl",
    ),
]
MaxErrors = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Maximum number of rows without an answer; with more, the job fails. It also fails "
        "if no row has an answer.",
        show_default="a tenth of the rows, and at least 10",
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
Draft = Annotated[bool, typer.Option(help="Whether to draft; the answers are equal either way.")]
KeepColumns = Annotated[
    bool,
    typer.Option(
        "--keep-columns",
        help="Write all fields of a row beside its answer. A field with the name of a field of "
        "the answer gets the prefix input_.",
        show_default="off",
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST_LOGPROBS,
        help="Write the log-probability of each token of an answer, and this many of the "
        "likeliest tokens at its position.",
        show_default="none",
    ),
]


Dedupe = Annotated[
    bool,
    typer.Option(
        help="Whether to decode rows with equal inputs once and copy the answer. Sampled rows are "
        "always decoded. The answers are equal either way."
    ),
]
Probabilities = Annotated[
    bool,
    typer.Option(
        "--probabilities",
        help="Write the label of each row, from --choices or the task's labels, with the "
        "probabilities of labels. The text is empty below the task's abstain_below.",
        show_default="off",
    ),
]
PricePerHour = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Price of an hour of one engine; the time to load it is not counted.",
        show_default="none",
    ),
]


if TYPE_CHECKING:
    from tasc_jobs.batch.cost import Meter
    from tasc_jobs.batch.work import JobReport
    from tasc_jobs.report.document import ReportDocument
    from tasc_protocol import GuideSpec, Request


@grouped({AnswerOptions: "the task's"})
def generate(
    *,
    task: Task,
    source: Input,
    output: Output,
    form: Format = None,
    part_bytes: PartBytes = None,
    reject: Reject = None,
    max_errors: MaxErrors = None,
    dry_run: DryRun = False,
    restart: Restart = False,
    pool: PoolOptions,
    stall_timeout: Stall = 600.0,
    adapter: Adapter = None,
    draft: Draft = True,
    keep_columns: KeepColumns = False,
    logprobs: Logprobs = None,
    probabilities: Probabilities = False,
    dedupe: Dedupe = True,
    answers: AnswerOptions,
    seed: Seed = 0,
    input_field: InputField = "input",
    id_field: IdField = "id",
    price_per_hour: PricePerHour = None,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Answer every row of the input with a pool of engines.

    An answer has the id of its row as a string. If a row has no id, its number in the file is used
    (lines, including blank ones, count from 1), after the file's name if there are several files.
    If several rows have the same id, only the first is answered and the others are rejected.

    A job that was stopped or killed continues when the same command is run again; its state is in
    the folder OUTPUT.job. A changed input or other settings are refused without --restart.

    Parts are for large inputs and object stores. Each part has the answers to about --part-bytes
    of the input. OUTPUT/_manifest.json has the job's state and lists the finished parts. A row
    without an id gets the name of its file and its number; in a later part of JSON lines, the
    part's first byte comes between them, and lines count from there. Ids of parts are not compared.

    A report has the speed over time and the cost. It is also written as JSON, to FILE.json beside
    FILE.html.
    """
    from tasc_jobs.batch.inputs import Source, check_places, reject_file
    from tasc_jobs.batch.places import is_folder

    given = Source(tuple(source), input_field, id_field, keep_columns)
    require_files(answers.choices, answers.schema)
    plan, rejects = None, reject or reject_file(Path(output))
    if is_folder(output):
        if reject:
            raise UsageError("--reject: rejected rows of parts are in OUTPUT/_rejected; drop it")
        from tasc_jobs.batch.parts import Plan

        plan = Plan.of(given, output, part_bytes, form)
        _check_report(report, answers.choices, answers.schema)
    elif form or part_bytes:
        raise UsageError(
            f"--format and --part-bytes are for parts; end --output {output} with / to write them"
        )
    else:
        check_places(given, Path(output), rejects)
        _check_report(report, *source, output, rejects, answers.choices, answers.schema)
    if probabilities:
        _require_scoring(logprobs, dry_run, pool)
    with store.open(task) as url:
        from tasc_protocol import Request, Scoring
        from tasc_runtime.engine_settings import EngineSettings

        asked = Request(
            parameters=answers.parameters,
            seed=seed,
            guide=_guide(answers),
            logprobs=logprobs,
            adapter=adapter,
            scoring=Scoring() if probabilities else None,
        )
        job: dict[str, Any] = {
            "engine": pool.engine(EngineSettings()),
            "asked": asked,
            "actors": pool.actors,
            "actor_gpus": pool.gpus,
            "max_errors": max_errors,
            "restart": restart,
            "stall_s": stall_timeout,
            **({} if dedupe else {"dedupe_bytes": 0}),
        }
        _require_task(url, task, asked)
        note("starting Ray ...")
        from tasc_jobs.ray_local import local_ray

        with local_ray(num_cpus=max(4, pool.actors + 1)):
            from tasc_jobs.batch import generate as jobs
            from tasc_jobs.batch import parts
            from tasc_jobs.batch.cost import Meter

            place: tuple[Any, ...] = (plan,) if plan else (given, Path(output))
            job |= {} if plan else {"reject": rejects}
            if dry_run:
                dry = parts.dry_run if plan else jobs.dry_run
                found = replace(dry(url, task, *place, **job), price_per_hour=price_per_hour)
                _show(found.page(task), found.as_json, report, as_json)
                return
            try:
                with show_progress("answer", None) as bar:
                    shown = jobs.BatchProgress(bar, Meter(price_per_hour))
                    answer = parts.generate_parts if plan else jobs.generate
                    done = answer(url, task, *place, draft=draft, progress=shown, **job)
            except SystemExit:  # Ctrl-C or SIGTERM
                kept, but = "parts" if plan else "rows", " without --restart" * restart
                note(f"finished {kept} are kept; run the command again{but} to do the rest")
                raise
    if done.repeats and not dedupe:
        note(f"--no-dedupe: an earlier start copied {done.repeats} answers; they are the same")
    where = f"{plan.place.shown}/_rejected" if plan else str(rejects)
    content, text = _results(done, shown.meter, where)
    _show(shown.meter.page(task, *text.splitlines()), content, report, as_json)


def _check_report(report: Path | None, *used: Path | str | None) -> None:
    """Raises UsageError if the report cannot be written, or would overwrite a file that is used."""
    check_report(report)
    beside = report and report.with_suffix(".json").resolve()
    if report and (report.suffix != ".html" or beside in [Path(f).resolve() for f in used if f]):
        raise UsageError(f"--report is {report}; name a .html file whose .json is not used here")


def _show(page: "ReportDocument", content: dict[str, Any], file: Path | None, json_: bool) -> None:
    print_result(content, "\n".join(page.summary), json_)
    if file:
        from tasc_jobs.report.web_page import write_html

        write_html(page, file)
        file.with_suffix(".json").write_text(json.dumps(content) + "\n")
        note(f"report: {file}")


def _require_scoring(logprobs: int | None, dry_run: bool, pool: PoolOptions) -> None:
    """Raises UsageError if an option contradicts --probabilities."""
    if logprobs is not None:
        raise UsageError("--probabilities and --logprobs exclude each other; give one of them")
    if dry_run:
        raise UsageError("--dry-run compares drafts, which --probabilities does not use; drop it")
    if pool.backend == "vllm":
        raise UsageError("--probabilities needs --backend tasc; vLLM scores no labels")


def _results(report: "JobReport", meter: "Meter", rejects: str) -> tuple[dict[str, Any], str]:
    """Returns the results of a job for JSON and as text."""
    efficiency = round(report.block_efficiency, 3)
    first = f" (first: {' '.join(report.first_error.split())})" if report.first_error else ""
    where = rejects if report.errors else None
    text = f"{report.rows} rows, {report.errors} errors{first}"
    if report.repeats:
        text += f", {report.repeats} with the answer of an equal row"
    if report.rows > report.errors:
        text += f", {report.forwards:.2f} forward passes an answer"
    if report.resumed:
        text += f"; {report.resumed} rows were done before"
    if where:
        text += f"; see {where}"
    if (cost := meter.cost).seconds:
        text += f"\n{cost.rows} rows in {cost.in_words}"
    whole = {**asdict(report), "block_efficiency": efficiency, "reject_file": where}
    return {**cost.as_json, **whole, "samples": meter.samples}, text


def _require_task(url: str, task: str, asked: "Request") -> None:
    """Checks the task and the request before anything slow begins."""
    from msgspec import structs

    from tasc_jobs.tasks.model_folders import BaseModel
    from tasc_jobs.tasks.register import check_guide
    from tasc_jobs.tasks.values import option
    from tasc_runtime.engine.reader import adapter_of, parameters_of
    from tasc_store import TaskStore, connect

    record = TaskStore(connect(url)).get(task)
    try:
        parameters = parameters_of(asked.parameters, record.sampling)
        _ = structs.replace(asked, parameters=parameters).sampling  # raises for values out of range
        adapter_of(asked.adapter, record)
    except ValueError as error:
        name, blank, rest = str(error).partition(" ")
        raise UsageError(f"{option(name)}{blank}{rest}") from error
    if asked.scoring and not (asked.guide or record).choices:
        way_out = "give --choices, or set them with `tasc task set`"
        raise UsageError(f"--probabilities needs labels, and task {task} has none; {way_out}")
    if asked.guide:
        model = BaseModel.open(record.model, record.revision)
        check_guide(asked.guide, asked.guide.field, record, model)


def _guide(answers: AnswerOptions) -> "GuideSpec | None":
    """Returns the constraint on answers that the options give, if any."""
    from tasc_jobs.tasks.values import labels_of, read_text
    from tasc_protocol import GuideSpec
    from tasc_protocol.request import MOST_GUIDE_BYTES, GuideKind

    choices, schema, regex = answers.choices, answers.schema, answers.regex
    given = {"--choices": choices, "--schema": schema, "--regex": regex}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other; give one of them")
    labels = labels_of(choices) if choices else ()
    text = regex if schema is None else read_text("schema", schema, MOST_GUIDE_BYTES)
    if not named:
        return None
    if not (labels or text):
        raise UsageError(f"{named[0]} is empty; leave it out for answers of any form")
    kind: GuideKind = "choice" if labels else "json_schema" if schema else "regex"
    try:
        return GuideSpec(kind, labels, text or "", field=named[0])
    except ValueError as error:
        raise UsageError(f"{named[0]}: {error}") from error
