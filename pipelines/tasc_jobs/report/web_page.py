"""A report as one HTML file that can be read offline. Imported only where one is written."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tasc_jobs.report.document import ReportDocument
from tasc_jobs.report.plots import svg
from tasc_runtime.errors import FileError

_TEMPLATE = "report.html.j2"


def check_writable(path: Path) -> None:
    """Look at the place for a report before anything slow begins.

    Raises:
        FileError: Its folder does not exist, or it is a folder itself.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise FileError(f"cannot write the report to {path}: name a file in a folder that exists")


def write_html(page: ReportDocument, path: Path) -> None:
    """Write a page with its plots inside.

    Raises:
        FileError: The file cannot be written.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((files(__package__) / _TEMPLATE).read_text("utf-8"))
    drawn = [Markup(svg(plot)) for plot in page.plots]  # noqa: S704 - matplotlib escapes its text
    text = template.render(page=page, drawn=drawn)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot write the report to {path}: {error}") from error
