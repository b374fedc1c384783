"""The report of a forecast: the verdict for each b, and what it stands on."""

from collections.abc import Sequence

from tasc_draft import Replay
from tasc_jobs.tuning.acceptance import ACCEPTED, WORDS, acceptance_plot, acceptance_table
from tasc_jobs.tuning.forecast import Option, Outlook, how_to_set
from tasc_jobs.tuning.page import Line, Lines, Page, Table
from tasc_jobs.tuning.replay_page import efficiency_plot

_COLUMNS = (
    "b", "budget", "tokens/step", "nodes/step", "step ms", "plain step ms", "drafting us a row",
    "speed-up",
)  # fmt: skip


def forecast_page(
    task: str,
    outlooks: Sequence[Outlook],
    replays: dict[int, Replay],
    now: int,
    summary: Sequence[str],
) -> Page:
    """Speed-up by budget for each b; the summary says the verdicts, and how to follow them.

    Args:
        now: Most draft tokens of a row's step as the task is drafted so far.
    """
    said = [(each.verdict(), how_to_set(task, each, now)) for each in outlooks]
    rows = tuple(_row(outlook, option) for outlook in outlooks for option in outlook.options)
    runs = [(f"budget {budget}", found) for budget, found in replays.items()]
    efficiency = Line(task, list(replays), [r.tokens_per_step for r in replays.values()])
    return Page(
        f"Forecast for {task}",
        (*summary, *(line for pair in said for line in pair if line)),
        (
            Table("What to expect", _COLUMNS, rows),
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


def _line(outlook: Outlook) -> Line:
    known = [(o.budget, o.speed_up) for o in outlook.options if o.speed_up is not None]
    return Line(f"b = {outlook.rows}", [b for b, _ in known], [s for _, s in known])


def _row(outlook: Outlook, option: Option) -> tuple[str, ...]:
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
