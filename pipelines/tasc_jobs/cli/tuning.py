"""The commands `tasc replay`, `tasc tune` and `tasc calibrate`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Device,
    Eos,
    Report,
    RowIdOptions,
    StoreOptions,
    Task,
    check_report,
    grouped,
    numbers,
    require_files,
    show,
)
from tasc_jobs.errors import UsageError
from tasc_jobs.tasks.options import PromptOptions
from tasc_store import connect

Proposers = Annotated[
    list[str] | None,
    typer.Option(
        help="mixed, mixed-chain, tasc, tasc-tree, corpus, trie, bigrams; repeatable, or "
        "separated by commas.",
        show_default="mixed",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of rows to replay.", show_default="all")
]
Bigrams = Annotated[
    Path | None,
    typer.Option(
        help="Bigrams of the target model, from `tasc model-bigrams`.", show_default="none"
    ),
]
Online = Annotated[
    bool,
    typer.Option("--online", help="Also draft from answers replayed earlier.", show_default="off"),
]
AsJsonLines = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object per line instead of tables.", show_default="off"
    ),
]


@grouped({PromptOptions: "none"})
def replay(
    *,
    train: Annotated[list[Path], typer.Option(help="Rows to index; .jsonl, .jsonl.gz, .parquet")],
    test: Annotated[list[Path], typer.Option(help="Rows to replay.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json, or a folder with one.")],
    proposer: Proposers = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Maximum draft tokens per row and step.", show_default="4,8,16,32"),
    ] = None,
    limit: Limit = None,
    prompt: PromptOptions,
    eos: Eos = None,
    bigrams: Bigrams = None,
    online: Online = False,
    choices: Annotated[
        Path | None,
        typer.Option(
            help="File of labels that answers are limited to, one per line or a .json list.",
            show_default="none",
        ),
    ] = None,
    report: Report = None,
    row: RowIdOptions,
    as_json: AsJsonLines = False,
) -> None:
    """Estimate what drafting would save, by replaying known answers.

    This needs no model and no Redis. Without a template, the prompt is the input of the row. With
    labels (--choices), tokens that they force take no forward pass, with drafts or without.

    Drafts are trees, as in the service, except for mixed-chain, tasc and corpus, which draft
    chains.
    """
    from tasc_jobs.task_inputs import InputOptions
    from tasc_jobs.tasks.values import labels_of
    from tasc_jobs.tuning.commands import replay_job

    check_report(report)
    page = replay_job(
        InputOptions(tokenizer=tokenizer, eos=eos, **vars(prompt), files=train, fields=row.fields),
        test,
        limit,
        proposers=[name.strip() for names in proposer or ["mixed"] for name in names.split(",")],
        budgets=numbers("--budget", budget or ["4,8,16,32"], 1, 256),
        bigrams=bigrams,
        online=online,
        choices=labels_of(choices) if choices else (),
        emit=lambda figures: print(json.dumps(figures), flush=True) if as_json else None,
    )
    show(page, None, report, as_json)


@grouped()
def tune(
    *,
    task: Task,
    node_cost: Annotated[
        float,
        typer.Option(min=0, help="Cost of a draft token, as a fraction of a step without drafts."),
    ] = 0.02,
    step_cost: Annotated[
        Path | None,
        typer.Option(
            help="File of measured step costs, used instead of --node-cost.",
            show_default="none, --node-cost is used",
        ),
    ] = None,
    measure_cost: Annotated[
        bool,
        typer.Option(
            "--measure-cost",
            help="Measure step costs of the task's model on this machine and use them.",
            show_default="off",
        ),
    ] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, help="b, rows decoded together, for measured costs and --rows.")
    ] = 8,
    rows: Annotated[
        int,
        typer.Option(
            min=0, help="Measure the speed-up on this many held-out rows by running the model."
        ),
    ] = 0,
    tree: Annotated[
        bool, typer.Option("--tree/--chain", help="Shape of the drafts; the service uses trees.")
    ] = True,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Choose draft settings for TASK on held-out rows of its corpus, and make them current.

    Tuning always uses the mixture `mixed`. It replays known answers, which needs no model, and
    takes the task's labels, schema or expression into account. With --rows N, the model then
    answers N of these rows with drafts and without, and the last line has the measured speed-up.

    With measured costs, the report has the expected speed-up for each measured number of rows.
    Replicas keep costs in ~/.cache/tasc-serve/costs; --step-cost reads such files, and also
    those of other machines.
    """
    from tasc_jobs.tuning.commands import PriceOptions, tune_job
    from tasc_jobs.tuning.costs import read_cost_file

    check_report(report)
    if step_cost and measure_cost:
        raise UsageError("--step-cost and --measure-cost exclude each other; give one of them")
    costs = read_cost_file(step_cost) if step_cost else None
    price = PriceOptions(node_cost, batch_size, costs, measure_cost)
    with store.open() as url:
        figures, page = tune_job(connect(url), task, price, tree, rows)
    show(page, figures, report, as_json)


@grouped()
def calibrate(
    *,
    task: Task,
    rows: Annotated[
        list[Path],
        typer.Option(help="Rows that the model was not trained with; .jsonl, .jsonl.gz, .parquet"),
    ],
    end: Annotated[
        str | None,
        typer.Option(
            "--label-end",
            help="Text behind each label, for models whose answers go on there.",
            show_default="the task's, else end of sequence",
        ),
    ] = None,
    prior: Annotated[
        Literal["uniform", "empty"],
        typer.Option(
            help="empty: divide probabilities by those behind an empty input; for models that were "
            "not fine-tuned."
        ),
    ] = "uniform",
    device: Device = "auto",
    report: Report = None,
    row: RowIdOptions,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Make the probabilities of TASK's labels match how often the labels are right.

    Each output is one of the task's labels, or begins with a label and --label-end. The task keeps
    the fitted temperature, and biases of labels if they help rows that were not fitted on. Replicas
    use both at once. They are only for this model, adapter, dtype, prompt and set of labels:
    changes of these are refused until the temperature is unset. The report shows which threshold
    (abstain_below) gives which share of right labels.
    """
    from tasc_jobs.tuning.calibrate import calibrate_job

    require_files(*rows)
    check_report(report)
    with store.open(task) as url:
        figures, page = calibrate_job(
            connect(url), url, task, rows, row.fields, end, prior, device=device
        )
    show(page, figures, report, as_json)
