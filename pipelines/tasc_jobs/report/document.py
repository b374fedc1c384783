"""A report as data, with sentences, tables and plots, and its output in a terminal."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

_PIPED_WIDTH = 160  # width if stdout is not a terminal
_MAX_ROWS = 16  # maximum rows of a table in the terminal; the page has all rows


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first column has names, the others have figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, title: str, rows: Iterable[Mapping[str, str]]) -> "Table":
        """A table whose columns are the keys of its rows; without rows it has no columns."""
        found = list(rows)
        columns = tuple(found[0]) if found else ()
        return cls(title, columns, tuple(tuple(row.values()) for row in found))


@dataclass(frozen=True)
class Curve:
    """Named points; ``x`` and ``y`` have the same length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Lines:
    """A plot of lines.

    Attributes:
        ticks: All values of x. With ticks, the x axis is logarithmic.
        level: Height of a horizontal line for comparison.
        log_x: Whether the x axis is logarithmic without ticks.
        log_y: Whether the y axis is logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    lines: tuple[Curve, ...]
    ticks: tuple[int, ...] = ()
    level: float | None = None
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Bars:
    """A plot of named values, which may be negative; ``form`` is the format of each value."""

    title: str
    x_label: str
    bars: tuple[tuple[str, float], ...]
    form: str = "{:,.1f}"


@dataclass(frozen=True)
class ReportDocument:
    """A whole report; ``footer`` explains its terms."""

    title: str
    summary: tuple[str, ...]
    tables: tuple[Table, ...]
    plots: tuple[Lines | Bars, ...]
    footer: str = ""


def show(page: ReportDocument) -> None:
    """Print a report to stdout."""
    console = Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False
    )
    for table in page.tables:
        console.print(f"\n{table.title}", style="bold", soft_wrap=True)
        console.print(_rich(table))
        if len(table.rows) > _MAX_ROWS:
            console.print(f"and {len(table.rows) - _MAX_ROWS} more rows; a --report file has all")
    for line in ("", *page.summary):
        console.print(line, markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    shown = RichTable()
    for i, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if i else "left")
    for row in table.rows[:_MAX_ROWS]:
        shown.add_row(*row)
    return shown
