"""The command `tasc evaluate`: how good and how fast a model's answers are. It computes nothing."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from tasc_jobs.cli.options import (
    DEFAULT_DATA_DIR,
    AsJson,
    DataDir,
    Device,
    InputField,
    MaxTokens,
    OutputField,
    RedisUrl,
    Template,
    Threads,
    open_store,
)
from tasc_jobs.cli.report import Report, check_report, show

Test = Annotated[list[Path], typer.Option(help="Rows to answer; repeatable.")]
Task = Annotated[
    str | None, typer.Argument(help="Take what is not named below from this task's record.")
]
Model = Annotated[
    Path | None,
    typer.Option(help="Model folder, as `tasc finetune` writes it.", show_default="the task's"),
]
Train = Annotated[
    list[Path] | None,
    typer.Option(help="Rows to draft from; repeatable.", show_default="the task's corpus"),
]
Metrics = Annotated[
    Literal["massive", "tags", "labels", "exact", "text"],
    typer.Option(
        metavar="KIND",
        help="massive: intent, slot F1, joint; tags: a word; labels: with '; ' between them, "
        "micro precision, recall, F1; exact: and F1 of words; text: and ROUGE-L.",
    ),
]
Drafts = Annotated[bool, typer.Option("--drafts/--plain", help="Measure with drafts too.")]
Rows = Annotated[int, typer.Option(min=1, max=4096, help="b, rows decoded together.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Answer only so many rows.", show_default="all")
]
EvaluatedLen = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="Tokens of prompt and answer; rows without room are left out.",
        show_default="1024, or what the model has",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16, float64", show_default="the task's, or float32"),
]
Setting = Annotated[
    str | None,
    typer.Option(
        help="Name of runs that differ in new tokens alone; for `tasc forecast-ft --check`.",
        show_default="the task, or the model's folder",
    ),
]


def evaluate(
    test: Test,
    task: Task = None,
    model: Model = None,
    template: Template = None,
    train: Train = None,
    metrics: Metrics = "exact",
    drafts: Drafts = True,
    rows: Rows = 8,
    repeats: Repeats = 3,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    max_model_len: EvaluatedLen = None,
    dtype: Dtype = None,
    device: Device = "auto",
    threads: Threads = 1,
    setting: Setting = None,
    report: Report = None,
    input_field: InputField = "input",
    output_field: OutputField = "output",
    redis_url: RedisUrl = None,
    data_dir: DataDir = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """How good a model's answers are on test rows, and what they cost: tokens, steps, time.

    Without a TASK, --model and --template say what is asked. Answers are greedy; those with drafts
    are compared with those without. Loading, compiling and a warm-up are not timed.
    """
    import json

    from tasc_jobs.evaluate.evaluation import STAGES
    from tasc_jobs.evaluate.evaluation import evaluate as run
    from tasc_jobs.evaluate.evaluation_request import (
        EvaluationOptions,
        EvaluationRequest,
        evaluation,
    )
    from tasc_jobs.evaluate.page import evaluation_page
    from tasc_jobs.evaluate.subject import Setup
    from tasc_jobs.runtime.stages import Stages

    check_report(report)
    given = EvaluationRequest(
        task, model, template, tuple(test), tuple(train or ()), (input_field, output_field),
        dtype, device, max_tokens, limit,
    )  # fmt: skip
    how = EvaluationOptions(
        metrics, Setup(rows, max_model_len, threads), repeats, drafts, setting or ""
    )
    with ExitStack() as stack:
        url = stack.enter_context(open_store(redis_url, data_dir)) if task else None
        wanted = evaluation(url, given, how)
        found = run(wanted, stack.enter_context(Stages("evaluate", STAGES)))
    show(evaluation_page(found), report, as_json)
    if as_json:
        print(json.dumps(found.as_json))
