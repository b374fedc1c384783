"""A report as one HTML file that can be read offline, with plots by matplotlib."""

import io
import re
from importlib.resources import files
from pathlib import Path

import matplotlib
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tasc_jobs.report.document import Bars, Lines, ReportDocument
from tasc_runtime.errors import FileError

_INCHES = (6.4, 3.6)
_MARKERS = "os^Dvp*X"
_MAX_MARKED = 32  # maximum points of a line with markers; more would overlap
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# No element refers to the names of groups, and all plots of a page have the same names.
_GROUP_NAMES = re.compile(r'<g id="[^"]*">')
_TEMPLATE = "report.html.j2"


def svg(plot: Lines | Bars) -> str:
    """Returns a self-contained ``<svg>`` element; equal plots give equal text."""
    # The salt separates the names that plots of one page define. Text is not drawn as paths.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title}):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        _draw_lines(axes, plot) if isinstance(plot, Lines) else _draw_bars(axes, plot)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_METADATA)
    drawn = text.getvalue()
    return _GROUP_NAMES.sub("<g>", drawn[drawn.index("<svg") :])


def _draw_lines(axes: Axes, plot: Lines) -> None:
    for i, line in enumerate(plot.lines):
        marker = _MARKERS[i % len(_MARKERS)] if len(line.x) <= _MAX_MARKED else ""
        axes.plot(line.x, line.y, marker=marker, label=line.name)
    if plot.level is not None:
        axes.axhline(plot.level, color="gray", linestyle="--", linewidth=1)
    if plot.ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(plot.ticks, [str(tick) for tick in plot.ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    elif plot.log_x:
        axes.set_xscale("log")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(axis="y", alpha=0.3)
    if plot.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _draw_bars(axes: Axes, plot: Bars) -> None:
    names, values = zip(*plot.bars, strict=True)
    drawn = axes.barh(names, values, height=0.6)
    axes.bar_label(drawn, [plot.form.format(value) for value in values], padding=3)
    axes.axvline(0, color="gray", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(plot.x_label)


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
