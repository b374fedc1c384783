"""The commands `tasc replay`, `tasc tune` and `tasc forecast`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Eos,
    Report,
    RowIdOptions,
    StoreOptions,
    Task,
    check_report,
    grouped,
    numbers,
    show,
)
from tasc_jobs.tasks.options import PromptOptions
from tasc_store import connect

Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget", help="Maximum draft tokens per row and step.", show_default="4,8,16,32"
    ),
]
Tree = Annotated[
    bool, typer.Option("--tree/--chain", help="Shape of the drafts; the service uses trees.")
]
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
_BUDGETS, _MOST_BUDGET = ["4,8,16,32"], 256


@grouped({PromptOptions: "none"})
def replay(
    *,
    train: Annotated[list[Path], typer.Option(help="Rows to index; .jsonl, .jsonl.gz, .parquet")],
    test: Annotated[list[Path], typer.Option(help="Rows to replay.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json, or a folder with one.")],
    proposer: Proposers = None,
    budget: Budgets = None,
    limit: Limit = None,
    prompt: PromptOptions,
    eos: Eos = None,
    bigrams: Bigrams = None,
    online: Online = False,
    choices: Annotated[
        Path | None,
        typer.Option(
            help="File of labels that answers are limited to, one a line or a .json list.",
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
        budgets=numbers("--budget", budget or _BUDGETS, 1, _MOST_BUDGET),
        bigrams=bigrams,
        online=online,
        choices=labels_of(choices) if choices else (),
        emit=_print_line if as_json else lambda figures: None,
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
            help="File of measured costs, used instead of --node-cost; see `tasc forecast --help`.",
            show_default="none, --node-cost is used",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Rows decoded together, b; for --step-cost and --rows.")
    ] = 8,
    rows: Annotated[
        int,
        typer.Option(
            min=0, help="Measure the speed-up on so many held-out rows by running the model."
        ),
    ] = 0,
    tree: Tree = True,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Choose draft settings for TASK on held-out rows of its corpus, and make them current.

    Tuning always uses the mixture `mixed`. It replays known answers, which needs no model, and
    takes the task's labels, schema or expression into account. With --rows N, the model then
    answers N of these rows with drafts and without, and the last line has the measured speed-up.
    """
    from tasc_jobs.tuning.commands import PriceRequest, tune_job
    from tasc_jobs.tuning.forecast import read_cost_file

    check_report(report)
    costs = read_cost_file(step_cost) if step_cost else None
    price = PriceRequest(node_cost, costs, batch_size)
    with store.open() as url:
        figures, page = tune_job(connect(url), task, price, tree, rows)
    show(page, figures, report, as_json)


@grouped()
def forecast(
    *,
    task: Task,
    step_cost: Annotated[
        Path,
        typer.Option(
            help='JSON file of measured forward passes: {"model": .., "device": .., "dtype": .., '
            '"costs": [{"rows": 8, "tokens": 8, "context": 64, "seconds": 0.006}, ..]}'
        ),
    ],
    rows: Annotated[
        list[str] | None, typer.Option(help="Batch sizes b.", show_default="1,8,32")
    ] = None,
    budget: Budgets = None,
    tree: Tree = True,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Forecast the speed-up of TASK with drafts, and whether drafting pays off.

    The forecast uses the tuned draft settings if there are any, otherwise those of the task's
    record. The default mixture is `mixed`.
    """
    from tasc_jobs.tuning.commands import forecast_job
    from tasc_jobs.tuning.forecast import read_cost_file

    check_report(report)
    batch_sizes = numbers("--rows", rows or ["1,8,32"], 1, 4096)
    budgets = numbers("--budget", budget or _BUDGETS, 1, _MOST_BUDGET)
    costs = read_cost_file(step_cost)
    with store.open() as url:
        figures, page = forecast_job(connect(url), task, costs, batch_sizes, budgets, tree)
    show(page, figures, report, as_json)


def _print_line(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
