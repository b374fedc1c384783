"""A report of several commands: where it is written, and how it is shown. It computes nothing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasc_jobs.report.document import ReportDocument

Report = Annotated[
    Path | None,
    typer.Option(
        help="Also write the report, with plots, as one HTML file.", show_default="no file"
    ),
]


def check_report(report: Path | None) -> None:
    """Look at the place for a report before anything slow begins.

    Raises:
        FileError: Nothing can be written there.
    """
    if report:
        from tasc_jobs.report.web_page import check_writable

        check_writable(report)


def show(page: "ReportDocument", report: Path | None, as_json: bool) -> None:
    """Print a page unless figures are printed instead, and write it where that was asked for."""
    from tasc_jobs.report.terminal import show as show_in_terminal
    from tasc_jobs.runtime.progress import note

    if not as_json:
        show_in_terminal(page)
    if report:
        from tasc_jobs.report.web_page import write_html

        write_html(page, report)
        note(f"report: {report}")
