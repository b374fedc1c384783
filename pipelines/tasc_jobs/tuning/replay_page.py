"""The reports of `tasc replay` and `tasc tune`."""

from collections.abc import Sequence
from itertools import groupby

from tasc_draft import Replay
from tasc_jobs.report.document import Bars, Curve, Lines, ReportDocument, Table
from tasc_jobs.tuning.replays import Measured, rates
from tasc_jobs.tuning.tune import AtRows, Trial, Tuned, Worth

ACCEPTED = "Drafts accepted at each position, of those that reach it"
WORDS = (
    "Tokens per step is block efficiency: all tokens over all target forwards, end-of-sequence "
    "included. Acceptance at a position: drafts accepted there over drafts that reach it."
)
_GAIN = "tokens per step that a source adds"


def replay_page(found: Sequence[Measured], summary: Sequence[str]) -> ReportDocument:
    """Returns the report on tokens per step, costs and acceptance of each proposer and budget."""
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
        Curve(name, [m.budget for m in runs], [m.replay.tokens_per_step for m in runs])
        for name, runs in by_name
    )
    return ReportDocument(
        title,
        tuple(summary),
        (Table.of(title, map(_row, found)), *acceptance),
        (
            efficiency_plot(efficiency),
            acceptance_plot([(f"{m.proposer} {m.budget}", m.replay) for m in _few(by_name)]),
        ),
        WORDS,
    )


def efficiency_plot(lines: tuple[Curve, ...]) -> Lines:
    """Returns a plot of the tokens per step of each line, by budget."""
    budgets = tuple(sorted({int(x) for line in lines for x in line.x}))
    title, x_label = "Tokens per step by budget", "maximum draft tokens per step"
    return Lines(title, x_label, "tokens per step", lines, budgets)


def _few(by_name: Sequence[tuple[str, list[Measured]]]) -> list[Measured]:
    """Returns few runs for one plot: all budgets of a single proposer, or each proposer's last."""
    return by_name[0][1] if len(by_name) == 1 else [runs[-1] for _, runs in by_name]


def _row(measured: Measured) -> dict[str, str]:
    figures = measured.figures()
    corpus, whole = figures["index_corpus_bytes_per_token"], figures["index_bytes_per_token"]
    built = figures["index_tokens_read_per_s"]
    return {
        "proposer": measured.proposer,
        "budget": str(measured.budget),
        "tokens/step": f"{figures['tokens_per_step']:.3f}",
        "frozen": f"{figures['tokens_per_step_frozen']:.3f}",
        "coverage": f"{figures['coverage']:.1%}",
        "nodes/step": f"{figures['nodes_per_step']:.2f}",
        "draft us p50": f"{figures['draft_us_p50']:.1f}",
        "p99": f"{figures['draft_us_p99']:.1f}",
        "index MB": f"{figures['index_bytes'] / 1e6:.1f}",
        "corpus bytes/token": "-" if corpus is None else f"{corpus:.2f}",
        "bytes/token, prompts too": "-" if whole is None else f"{whole:.2f}",
        "build M tokens read/s": "-" if built is None else f"{built / 1e6:.2f}",
    }


def tune_page(
    task: str, tuned: Tuned, by_rows: Sequence[AtRows], summary: Sequence[str]
) -> ReportDocument:
    """Returns the report on trials, sources and acceptance, with speed-ups by rows if known."""
    found = tuned.chosen.replay
    acceptance = [("as chosen", found)]
    marked = [("chosen", tuned.chosen), *(("", trial) for trial in tuned.trials)]
    tried = [_tried_row(mark, trial) for mark, trial in marked]
    by_b = [Table.of("Expected speed-up by rows decoded together", map(_at_rows, by_rows))]
    gains = tuple((each.source, each.gain) for each in tuned.worths)
    return ReportDocument(
        f"Tuning of {task}",
        tuple(summary),
        (
            *(by_b if by_rows else ()),
            Table.of("Trials", tried),
            Table.of("Sources", map(_worth_row, tuned.worths)),
            acceptance_table(ACCEPTED, acceptance),
        ),
        (
            Bars("Gain by source", _GAIN, gains, "{:+.3f}"),
            efficiency_plot(_lines(tuned)),
            acceptance_plot(acceptance),
        ),
        WORDS,
    )


def _tried_row(mark: str, trial: Trial) -> dict[str, str]:
    settings, found = trial.settings, trial.replay
    return {
        "": mark,
        "neighbours": str(settings.neighbours),
        "budget": str(settings.num_speculative_tokens),
        "min_prob": str(settings.min_prob),
        "tokens/step": f"{found.tokens_per_step:.3f}",
        "nodes/step": f"{found.nodes / found.steps:.2f}",
        "expected speed-up": f"{trial.speed_up:.3f} x",
    }


def _worth_row(worth: Worth) -> dict[str, str]:
    return {
        "source": worth.source,
        "tokens/step with it": f"{worth.with_it:.3f}",
        "without it": f"{worth.without_it:.3f}",
        "gain": f"{worth.gain:+.3f}",
        "used": "yes" if worth.kept else "no",
    }


def _lines(tuned: Tuned) -> tuple[Curve, ...]:
    """Returns tokens per step by budget, with a line for each minimum probability."""
    grid = sorted(tuned.grid, key=lambda t: t.settings.min_prob)
    return tuple(
        Curve(
            f"min_prob {min_prob}",
            [t.settings.num_speculative_tokens for t in trials],
            [t.replay.tokens_per_step for t in trials],
        )
        for min_prob, trials in (
            (p, list(same)) for p, same in groupby(grid, key=lambda t: t.settings.min_prob)
        )
    )


def _at_rows(found: AtRows) -> dict[str, str]:
    return {
        "b": str(found.rows),
        "plain step ms": f"{found.plain_seconds * 1e3:.2f}",
        "speed-up as chosen": _times(found.speed_up),
        "best budget": str(found.best_budget),
        "its speed-up": _times(found.best_speed_up),
    }


def _times(speed_up: float | None) -> str:
    return "not measured" if speed_up is None else f"{speed_up:.2f} x"


def acceptance_table(title: str, runs: Sequence[tuple[str, Replay]]) -> Table:
    """Returns the share of accepted drafts at each position, with a column per replay."""
    deepest = max(len(found.reached) for _, found in runs)
    columns = ("position", *(name for name, _ in runs))
    rows = tuple((str(at), *(_share(found, at) for _, found in runs)) for at in range(deepest))
    return Table(title, columns, rows)


def acceptance_plot(runs: Sequence[tuple[str, Replay]]) -> Lines:
    lines = tuple(Curve(name, range(len(found.reached)), rates(found)) for name, found in runs)
    return Lines("Acceptance by position", "position in the draft", "accepted / reached", lines)


def _share(found: Replay, at: int) -> str:
    if at >= len(found.reached):
        return ""
    return f"{rates(found)[at]:.1%} ({found.accepted[at]:,}/{found.reached[at]:,})"
