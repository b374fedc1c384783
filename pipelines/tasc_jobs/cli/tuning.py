"""The commands `tasc replay`, `tasc tune` and `tasc forecast`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tasc_jobs.cli.options import (
    AsJson,
    Report,
    RowIdOptions,
    StoreOptions,
    Task,
    check_report,
    grouped,
    show,
)
from tasc_store import connect

MIXTURES = """\
mixed: all sources, weighed by weights learnt on held-out rows; the service's default.

tasc: TASC-spec, n-grams of the corpus's outputs and of the row's own text at a fixed ratio.

trie: N-Gram Trie, n-grams of the row's prompt alone, the most frequent first."""

Budgets = Annotated[
    list[str] | None,
    typer.Option("--budget", help="Most draft tokens of a row's step.", show_default="4,8,16,32"),
]
Tree = Annotated[
    bool, typer.Option("--tree/--chain", help="Shape of the drafts; the service drafts trees.")
]
Proposers = Annotated[
    list[str] | None,
    typer.Option(
        help="mixed, mixed-chain, tasc, tasc-tree, corpus, trie, bigrams; repeatable, or with "
        "commas.",
        show_default="mixed",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Replay only so many rows.", show_default="all")
]
Template = Annotated[
    str | None,
    typer.Option(help=r"Prompt with {input}; \n is a line break.", show_default="the input"),
]
Eos = Annotated[
    str | None,
    typer.Option(
        help="The token that ends an answer.", show_default="the tokenizer's, or the usual one"
    ),
]
Bigrams = Annotated[
    Path | None,
    typer.Option(help="The target's own bigrams, from `tasc model-bigrams`.", show_default="none"),
]
Online = Annotated[
    bool,
    typer.Option(
        "--online", help="Let answers replayed before be drafted from.", show_default="off"
    ),
]
AsJsonLines = Annotated[
    bool,
    typer.Option(
        "--json", help="Print a JSON object a line instead of tables.", show_default="off"
    ),
]
_MOST_BUDGET, _MOST_ROWS = 256, 4096


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
    eos: Eos = None,
    bigrams: Bigrams = None,
    online: Online = False,
    report: Report = None,
    row: RowIdOptions,
    as_json: AsJsonLines = False,
) -> None:
    """What would drafting save? Replays known answers; needs no model and no Redis.

    Drafts replayed here are trees, as today's service verifies them, but for mixed-chain, tasc
    and corpus, which draft chains.
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
        template=None if template is None else template.replace("\\n", "\n"),
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
        typer.Option(min=0, help="What a draft token costs, as a share of a step without drafts."),
    ] = 0.02,
    step_cost: Annotated[
        Path | None,
        typer.Option(
            help="Costs measured on a machine, instead of --node-cost; see `tasc forecast --help`.",
            show_default="none, --node-cost is assumed",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="b, rows decoded together; for --step-cost.")
    ] = 8,
    tree: Tree = True,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """Choose how to draft TASK on rows held out of its corpus, and make that current.

    What is tuned is always mixed.
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
            help='JSON of measured forwards: {"model": .., "device": .., "dtype": .., "costs": '
            '[{"rows": 8, "tokens": 8, "context": 64, "seconds": 0.006}, ..]}'
        ),
    ],
    rows: Annotated[
        list[str] | None, typer.Option(help="b, rows decoded together.", show_default="1,8,32")
    ] = None,
    budget: Budgets = None,
    tree: Tree = True,
    report: Report = None,
    store: StoreOptions,
    as_json: AsJson = False,
) -> None:
    """What speed-up to expect of drafting TASK, and whether to draft at all.

    It is drafted for as it was tuned, else as its record says; mixed where nobody said otherwise.
    """
    from tasc_jobs.tuning.commands import forecast_job
    from tasc_jobs.tuning.forecast import read_cost_file

    check_report(report)
    several = _numbers("--rows", rows or ["1,8,32"], _MOST_ROWS)
    budgets = _budgets(budget)
    costs = read_cost_file(step_cost)
    with store.open() as url:
        figures, page = forecast_job(connect(url), task, costs, several, budgets, tree)
    show(page, figures, report, as_json)


def _budgets(values: list[str] | None) -> tuple[int, ...]:
    return _numbers("--budget", values or ["4,8,16,32"], _MOST_BUDGET)


def _numbers(option: str, values: list[str], most: int) -> tuple[int, ...]:
    """Whole numbers from 1, each once, rising."""
    parts = _split(values)
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        said = ",".join(parts)
        raise typer.BadParameter(f"{option} is {said!r}; give numbers from 1 to {most}, as in 4,8")
    return tuple(sorted({int(part) for part in parts}))


def _split(values: list[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",")]


def _print_line(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)
