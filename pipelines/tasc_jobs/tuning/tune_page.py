"""The report of a tuning: what was chosen, what each source is worth, what was tried."""

from collections.abc import Sequence
from itertools import groupby

from tasc_jobs.tuning.acceptance import ACCEPTED, WORDS, acceptance_plot, acceptance_table
from tasc_jobs.tuning.page import Bars, Line, Page, Table
from tasc_jobs.tuning.replay_page import efficiency_plot
from tasc_jobs.tuning.tune import Trial, Tuned, Worth

_GAIN = "tokens per step that a source adds"


def tune_page(task: str, tuned: Tuned, summary: Sequence[str]) -> Page:
    found = tuned.chosen.replay
    acceptance = [("as chosen", found)]
    return Page(
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
    rows = [_row("chosen", tuned.chosen), *(_row("", trial) for trial in tuned.trials)]
    columns = (
        "", "neighbours", "budget", "min_prob", "tokens/step", "nodes/step", "expected speed-up",
    )  # fmt: skip
    return Table("What was tried", columns, tuple(rows))


def _row(mark: str, trial: Trial) -> tuple[str, ...]:
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


def _lines(tuned: Tuned) -> tuple[Line, ...]:
    """Tokens per step by budget, a line for each least probability."""
    grid = sorted(tuned.grid, key=lambda t: t.settings.min_prob)
    return tuple(
        Line(
            f"min_prob {min_prob}",
            [t.settings.num_speculative_tokens for t in trials],
            [t.replay.tokens_per_step for t in trials],
        )
        for min_prob, trials in (
            (p, list(same)) for p, same in groupby(grid, key=lambda t: t.settings.min_prob)
        )
    )
