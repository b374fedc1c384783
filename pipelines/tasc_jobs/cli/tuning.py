"""The commands `tasc replay`, `tasc tune` and `tasc forecast`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tasc_jobs.cli.options import (
    AsJson,
    ChatOptions,
    Report,
    RowIdOptions,
    StoreOptions,
    Task,
    check_report,
    grouped,
    show,
)
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
Template = Annotated[
    str | None,
    typer.Option(
        help=r"Prompt template with {input}; \n is a line break.", show_default="the input"
    ),
]
Eos = Annotated[
    str | None,
    typer.Option(
        help="Token that ends an answer.",
        show_default="the tokenizer's, or a common one",
    ),
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
_MAX_BUDGET, _MAX_ROWS = 256, 4096


@grouped()
def replay(
    *,
    train: Annotated[list[Path], typer.Option(help="Rows to index; .jsonl, .jsonl.gz, .parquet")],
    test: Annotated[list[Path], typer.Option(help="Rows to replay.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json, or a folder with one.")],
    proposer: Proposers = None,
    budget: Budgets = None,
    limit: Limit = None,
    template: Template = None,
    chat: ChatOptions,
    eos: Eos = None,
    bigrams: Bigrams = None,
    online: Online = False,
    report: Report = None,
    row: RowIdOptions,
    as_json: AsJsonLines = False,
) -> None:
    """Estimate what drafting would save, by replaying known answers.

    This needs no model and no Redis. Drafts are trees, as in the service, except for mixed-chain,
    tasc and corpus, which draft chains.
    """
    from tasc_jobs.tuning.commands import ReplayRequest, replay_job

    check_report(report)
    request = ReplayRequest(
        train=tuple(train),
        test=tuple(test),
        tokenizer=tokenizer,
        proposers=tuple(_split(proposer or ["mixed"])),
        budgets=_budgets(budget),
        limit=limit,
        eos=eos,
        template=template,
        **vars(chat),
        bigrams=bigrams,
        online=online,
        fields=row.fields,
    )
    page = replay_job(request, _print_line if as_json else lambda figures: None)
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
    rows: Annotated[int, typer.Option(min=1, help="Batch size b; used with --step-cost.")] = 8,
    tree: Tree = True,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Choose draft settings for TASK on held-out rows of its corpus, and make them current.

    Tuning always uses the mixture `mixed`.
    """
    from tasc_jobs.tuning.commands import PriceRequest, tune_job
    from tasc_jobs.tuning.forecast import read_cost_file

    check_report(report)
    price = PriceRequest(node_cost, read_cost_file(step_cost) if step_cost else None, rows)
    with store.open() as url:
        figures, page = tune_job(connect(url), task, price, tree)
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
    batch_sizes = _numbers("--rows", rows or ["1,8,32"], _MAX_ROWS)
    budgets = _budgets(budget)
    costs = read_cost_file(step_cost)
    with store.open() as url:
        figures, page = forecast_job(connect(url), task, costs, batch_sizes, budgets, tree)
    show(page, figures, report, as_json)


def _budgets(values: list[str] | None) -> tuple[int, ...]:
    return _numbers("--budget", values or ["4,8,16,32"], _MAX_BUDGET)


def _numbers(option: str, values: list[str], maximum: int) -> tuple[int, ...]:
    """Parses whole numbers from 1 to `maximum`; returns them sorted, without duplicates."""
    parts = _split(values)
    if not all(part.isdecimal() and 1 <= int(part) <= maximum for part in parts):
        given = ",".join(parts)
        raise typer.BadParameter(
            f"{option} is {given!r}; give numbers from 1 to {maximum}, for example 4,8"
        )
    return tuple(sorted({int(part) for part in parts}))


def _split(values: list[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",")]


def _print_line(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
