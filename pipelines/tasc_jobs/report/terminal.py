"""A report in a terminal: sentences and tables; plots are left to the page."""

import sys

from rich.console import Console
from rich.table import Table as RichTable

from tasc_jobs.report.document import ReportDocument, Table

_PIPED_WIDTH = 160  # where nobody says how wide it is
_MOST_ROWS = 16  # the page has them all


def show(page: ReportDocument) -> None:
    """Print a report to stdout."""
    console = Console(
        file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False
    )
    for table in page.tables:
        console.print(f"\n{table.title}", style="bold", soft_wrap=True)
        console.print(_rich(table))
        if len(table.rows) > _MOST_ROWS:
            console.print(f"and {len(table.rows) - _MOST_ROWS} more; --report has them all")
    for line in ("", *page.summary):
        console.print(line, markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    shown = RichTable()
    for i, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if i else "left")
    for row in table.rows[:_MOST_ROWS]:
        shown.add_row(*row)
    return shown
