"""The command `tasc evaluate`, which measures quality and cost of a model's answers."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tasc_jobs.cli.options import (
    AsJson,
    MaxTokens,
    ModelDtype,
    Report,
    StoreOptions,
    TrainOptions,
    check_report,
    grouped,
    require_files,
    show,
)
from tasc_train.cli.options import EngineOptions, ModelAndPrompt

Test = Annotated[list[Path], typer.Option(help="Rows to answer; repeatable.")]
Task = Annotated[
    str | None, typer.Argument(help="Task whose record supplies the options that are not given.")
]
Metrics = Annotated[
    Literal["massive", "tags", "labels", "exact", "text"],
    typer.Option(
        metavar="KIND",
        help="massive: intent, slot F1, joint accuracy; tags: accuracy per word; labels, separated "
        "by '; ': micro precision, recall, F1, and calibration error and Brier score if the task "
        "has choices; exact: F1 of words; text: F1 of words, ROUGE-L. All kinds include exact "
        "match.",
    ),
]
Drafts = Annotated[
    bool, typer.Option("--drafts/--plain", help="Whether to also measure with drafts.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Number of timed runs; the median is reported.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of rows.", show_default="all")
]
Setting = Annotated[
    str | None,
    typer.Option(
        help="Name of the report. Use one name for runs that differ only in the number of new "
        "tokens.",
        show_default="the task, or the model's folder",
    ),
]
EXAMPLES = """\
A task: tasc evaluate tickets --test test.jsonl --metrics labels

A model that is not a task yet: tasc evaluate --model tuned/model
--test test.jsonl"""


@grouped({ModelAndPrompt: "the task's"})
def evaluate(
    *,
    test: Test,
    task: Task = None,
    model: ModelAndPrompt,
    data: TrainOptions,
    metrics: Metrics = "exact",
    drafts: Drafts = True,
    engine: EngineOptions,
    repeats: Repeats = 3,
    limit: Limit = None,
    max_tokens: MaxTokens = None,
    dtype: ModelDtype = None,
    setting: Setting = None,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Measure quality and cost of a model's answers to test rows: metrics, tokens, steps, time.

    Give a TASK, or --model and a template; with a TASK, these options replace its values. Answers
    are greedy, and answers with drafts are compared with answers without. Drafts come from an index
    of the rows of --train, or of the task's corpus. Loading, compiling and a warm-up are not timed.
    """
    require_files(*test, *data.files)
    check_report(report)
    from tasc_jobs.task_inputs import TaskInputs, read_files
    from tasc_runtime.progress import Stages

    options = model.inputs(task, data, max_tokens=max_tokens, dtype=dtype, device=engine.device)
    with store.open_if(task is not None, task) as url:
        from tasc_train.evaluate.evaluation import STAGES, Evaluation, evaluation_page
        from tasc_train.evaluate.evaluation import evaluate as run

        answered = read_files(test, data.fields, limit).rows
        inputs = TaskInputs.read(url, options)
        source, record = inputs.source, inputs.record
        if record and (model != ModelAndPrompt() or dtype):  # the calibration is for others
            record = replace(record, label_temperature=None)
        evaluation = Evaluation(
            source,
            inputs.generation,
            engine.setup,
            metrics,
            answered,
            inputs.rows,
            repeats,
            drafts,
            setting or task or source.folder.name,
            record,
        )
        with Stages("evaluate", STAGES) as stages:
            found = run(evaluation, stages)
    show(evaluation_page(found), found.as_json, report, as_json)
