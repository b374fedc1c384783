"""The command `tasc enrich`, which adds frequent n-grams of a task to a tokenizer as tokens."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Eos,
    StoreOptions,
    TrainOptions,
    grouped,
    print_result,
    require_files,
)
from tasc_train.cli.options import NgramOptions

Output = Annotated[Path, typer.Option(help="New folder for the tokenizer.")]
Task = Annotated[str | None, typer.Argument(help="Take the outputs of this task's corpus.")]
Test = Annotated[
    list[Path] | None,
    typer.Option(
        help="Measure the gain on the outputs of this file; repeatable.",
        show_default="the outputs that tokens are taken from",
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        "--model",
        help="Model folder, or tokenizer.json.",
        show_default="that of the task's model",
    ),
]
Budget = Annotated[int, typer.Option(min=0, max=100_000, help="Maximum number of new tokens.")]
Refine = Annotated[
    bool,
    typer.Option(
        help="Choose tokens by leave-one-out gain instead of the paper's rule, and replace tokens "
        "that hardly occur."
    ),
]


EXAMPLES = "tasc enrich tickets --budget 500 --output tokenizer-500"


@grouped()
def enrich(
    *,
    output: Output,
    task: Task = None,
    data: TrainOptions,
    test: Test = None,
    tokenizer: Tokenizer = None,
    budget: Budget = 500,
    ngrams: NgramOptions,
    refine: Refine = False,
    eos: Eos = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Merge the frequent n-grams of task outputs into single tokens (step 1 of TASC-ft).

    A model that `tasc finetune` has taught the new tokens needs fewer steps for the same text. The
    new tokenizer decodes to the same text as the original tokenizer.
    """
    data.require_either(task)
    require_files(*data.files, *(test or ()), tokenizer)
    from tasc_jobs.task_inputs import InputOptions, TaskInputs, read_files
    from tasc_runtime.progress import Stages
    from tasc_train.enrich.enrichment import STAGES, enrich_and_save

    settings = ngrams.settings(budget)
    if refine:
        settings = settings.refining
    options = InputOptions(
        task=task, tokenizer=tokenizer, eos=eos, files=data.files, fields=data.fields
    )
    with store.open_if(task is not None, task) as url:
        inputs = TaskInputs.read(url, options)
    judged = read_files(test, data.fields).rows if test else ()
    with Stages("enrich", STAGES) as stages:
        report = enrich_and_save(
            inputs.tokenizer,
            [each.output for each in inputs.some_rows],
            settings,
            output,
            test=[each.output for each in judged],
            others=[each.input for each in inputs.some_rows],
            progress=stages,
        )
    print_result(asdict(report), report.in_words, as_json)
