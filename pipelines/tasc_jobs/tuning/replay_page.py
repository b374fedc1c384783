"""The reports of `tasc replay`, `tasc tune` and `tasc forecast`."""

from collections.abc import Sequence
from itertools import groupby

from tasc_draft import Replay
from tasc_jobs.report.document import Bars, Curve, Lines, ReportDocument, Table
from tasc_jobs.tuning.forecast import Option, Outlook, how_to_set
from tasc_jobs.tuning.replays import ACCEPTED, WORDS, Measured, acceptance_plot, acceptance_table
from tasc_jobs.tuning.tune import Trial, Tuned, Worth

_COLUMNS = (
    "proposer", "budget", "tokens/step", "frozen", "coverage", "nodes/step",
    "draft us p50", "p99", "index MB", "corpus bytes/token", "bytes/token, prompts too",
    "build M tokens read/s",
)  # fmt: skip


def replay_page(found: Sequence[Measured], summary: Sequence[str]) -> ReportDocument:
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
        Curve(name, [m.budget for m in runs], [m.replay.tokens_per_step for m in runs])
        for name, runs in by_name
    )
    return ReportDocument(
        title,
        tuple(summary),
        (Table(title, _COLUMNS, tuple(_row(m) for m in found)), *acceptance),
        (
            efficiency_plot(efficiency),
            acceptance_plot([(f"{m.proposer} {m.budget}", m.replay) for m in _few(by_name)]),
        ),
        WORDS,
    )


def efficiency_plot(lines: tuple[Curve, ...]) -> Lines:
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


_GAIN = "tokens per step that a source adds"


def tune_page(task: str, tuned: Tuned, summary: Sequence[str]) -> ReportDocument:
    found = tuned.chosen.replay
    acceptance = [("as chosen", found)]
    return ReportDocument(
        f"Tuning of {task}",
        tuple(summary),
        (
            _tried(tuned),
            _worth(tuned.worths),
            acceptance_table(ACCEPTED, acceptance),
        ),
        (
            Bars("Gain by source", _GAIN, tuple((w.source, w.gain) for w in tuned.worths)),
            efficiency_plot(_lines(tuned)),
            acceptance_plot(acceptance),
        ),
        WORDS,
    )


def _tried(tuned: Tuned) -> Table:
    rows = [
        _tuned_row("chosen", tuned.chosen),
        *(_tuned_row("", trial) for trial in tuned.trials),
    ]
    columns = (
        "", "neighbours", "budget", "min_prob", "tokens/step", "nodes/step", "expected speed-up",
    )  # fmt: skip
    return Table("What was tried", columns, tuple(rows))


def _tuned_row(mark: str, trial: Trial) -> tuple[str, ...]:
    settings, found = trial.settings, trial.replay
    return (
        mark,
        str(settings.neighbours),
        str(settings.num_speculative_tokens),
        str(settings.min_prob),
        f"{found.tokens_per_step:.3f}",
        f"{found.nodes / found.steps:.2f}",
        f"{trial.speed_up:.3f} x",
    )


def _worth(worths: Sequence[Worth]) -> Table:
    rows = ((w.source, f"{w.with_it:.3f}", f"{w.without_it:.3f}", f"{w.gain:+.3f}") for w in worths)
    columns = ("source", "tokens/step with it", "without it", "gain")
    return Table("What each source is worth", columns, tuple(rows))


def _lines(tuned: Tuned) -> tuple[Curve, ...]:
    """Tokens per step by budget, a line for each least probability."""
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


_FORECAST_COLUMNS = (
    "b", "budget", "tokens/step", "nodes/step", "step ms", "plain step ms", "drafting us a row",
    "speed-up",
)  # fmt: skip


def forecast_page(
    task: str,
    outlooks: Sequence[Outlook],
    replays: dict[int, Replay],
    now: int,
    summary: Sequence[str],
) -> ReportDocument:
    """Speed-up by budget for each b; the summary says the verdicts, and how to follow them.

    Args:
        now: Most draft tokens of a row's step as the task is drafted so far.
    """
    said = [(each.verdict(), how_to_set(task, each, now)) for each in outlooks]
    rows = tuple(
        _forecast_row(outlook, option) for outlook in outlooks for option in outlook.options
    )
    runs = [(f"budget {budget}", found) for budget, found in replays.items()]
    efficiency = Curve(task, list(replays), [r.tokens_per_step for r in replays.values()])
    return ReportDocument(
        f"Forecast for {task}",
        (*summary, *(line for pair in said for line in pair if line)),
        (
            Table("What to expect", _FORECAST_COLUMNS, rows),
            acceptance_table(ACCEPTED, runs),
        ),
        (
            Lines(
                "Expected speed-up by budget",
                "most draft tokens of a step",
                "tokens a second, plain = 1",
                tuple(_line(outlook) for outlook in outlooks),
                tuple(replays),
                level=1.0,
            ),
            efficiency_plot((efficiency,)),
            acceptance_plot(runs),
        ),
        WORDS,
    )


def _line(outlook: Outlook) -> Curve:
    known = [(o.budget, o.speed_up) for o in outlook.options if o.speed_up is not None]
    return Curve(f"b = {outlook.rows}", [b for b, _ in known], [s for _, s in known])


def _forecast_row(outlook: Outlook, option: Option) -> tuple[str, ...]:
    step, speed_up = option.step_seconds, option.speed_up
    return (
        str(outlook.rows),
        str(option.budget),
        f"{option.tokens_per_step:.3f}",
        f"{option.nodes_per_step:.2f}",
        "not measured" if step is None else f"{step * 1e3:.2f}",
        f"{outlook.plain_seconds * 1e3:.2f}",
        f"{option.draft_seconds * 1e6:.0f}",
        "not measured" if speed_up is None else f"{speed_up:.2f} x",
    )
