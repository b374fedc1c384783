"""The report of a replay."""

from collections.abc import Sequence
from itertools import groupby

from tasc_jobs.tuning.acceptance import ACCEPTED, WORDS, acceptance_plot, acceptance_table
from tasc_jobs.tuning.page import Line, Lines, Page, Table
from tasc_jobs.tuning.replays import Measured

_COLUMNS = (
    "proposer", "budget", "tokens/step", "frozen", "coverage", "nodes/step",
    "draft us p50", "p99", "index MB", "corpus bytes/token", "bytes/token, prompts too",
    "build M tokens read/s",
)  # fmt: skip


def replay_page(found: Sequence[Measured], summary: Sequence[str]) -> Page:
    """Tokens per step, costs, and acceptance by position of every proposer and budget."""
    title = f"Replay of {found[0].replay.rows:,} rows, {found[0].replay.tokens:,} tokens"
    by_name = [(name, list(runs)) for name, runs in groupby(found, key=lambda m: m.proposer)]
    acceptance = (
        acceptance_table(
            f"{name}: {ACCEPTED[0].lower()}{ACCEPTED[1:]}",
            [(f"budget {m.budget}", m.replay) for m in runs],
        )
        for name, runs in by_name
    )
    efficiency = tuple(
        Line(name, [m.budget for m in runs], [m.replay.tokens_per_step for m in runs])
        for name, runs in by_name
    )
    return Page(
        title,
        tuple(summary),
        (Table(title, _COLUMNS, tuple(_row(m) for m in found)), *acceptance),
        (
            efficiency_plot(efficiency),
            acceptance_plot([(f"{m.proposer} {m.budget}", m.replay) for m in _few(by_name)]),
        ),
        WORDS,
    )


def efficiency_plot(lines: tuple[Line, ...]) -> Lines:
    """Tokens per step of each line, by budget."""
    budgets = tuple(sorted({int(x) for line in lines for x in line.x}))
    title, x_label = "Tokens per step by budget", "most draft tokens of a step"
    return Lines(title, x_label, "tokens per step", lines, budgets)


def _few(by_name: Sequence[tuple[str, list[Measured]]]) -> list[Measured]:
    """Few enough for one plot: all budgets of one proposer, else the last of each."""
    return by_name[0][1] if len(by_name) == 1 else [runs[-1] for _, runs in by_name]


def _row(measured: Measured) -> tuple[str, ...]:
    figures = measured.figures()
    corpus, whole = figures["index_corpus_bytes_per_token"], figures["index_bytes_per_token"]
    built = figures["index_tokens_read_per_s"]
    return (
        measured.proposer,
        str(measured.budget),
        f"{figures['tokens_per_step']:.3f}",
        f"{figures['tokens_per_step_frozen']:.3f}",
        f"{figures['coverage']:.1%}",
        f"{figures['nodes_per_step']:.2f}",
        f"{figures['draft_us_p50']:.1f}",
        f"{figures['draft_us_p99']:.1f}",
        f"{figures['index_bytes'] / 1e6:.1f}",
        "-" if corpus is None else f"{corpus:.2f}",
        "-" if whole is None else f"{whole:.2f}",
        "-" if built is None else f"{built / 1e6:.2f}",
    )
