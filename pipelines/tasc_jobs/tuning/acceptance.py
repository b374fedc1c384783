"""Acceptance by position, as a table with both counts and as a plot. It replays nothing."""

from collections.abc import Sequence

from tasc_draft import Replay
from tasc_jobs.report.document import Curve, Lines, Table

ACCEPTED = "Drafts accepted at each position, of those that reach it"
WORDS = (
    "Tokens per step is block efficiency: all tokens over all target forwards, end-of-sequence "
    "included. Acceptance at a position: drafts accepted there over drafts that reach it."
)


def acceptance_table(title: str, runs: Sequence[tuple[str, Replay]]) -> Table:
    """Accepted of reached at every position, a column for each named replay."""
    deepest = max(len(found.reached) for _, found in runs)
    columns = ("position", *(name for name, _ in runs))
    rows = tuple((str(at), *(_share(found, at) for _, found in runs)) for at in range(deepest))
    return Table(title, columns, rows)


def acceptance_plot(runs: Sequence[tuple[str, Replay]]) -> Lines:
    lines = tuple(Curve(name, range(len(found.reached)), rates(found)) for name, found in runs)
    return Lines("Acceptance by position", "position in the draft", "accepted / reached", lines)


def rates(found: Replay) -> list[float]:
    """At each position, drafts accepted there over drafts that reach it."""
    return [a / r for a, r in zip(found.accepted, found.reached, strict=True)]


def _share(found: Replay, at: int) -> str:
    if at >= len(found.reached):
        return ""
    return f"{rates(found)[at]:.1%} ({found.accepted[at]:,}/{found.reached[at]:,})"
