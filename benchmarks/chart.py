"""Draws the README's chart: the speed-up by drafts of each run in a file of results.

python benchmarks/chart.py    # benchmarks/results/speed_up.json to docs/images/speed_up.svg
"""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "speed_up.json"
IMAGE = ROOT / "docs" / "images" / "speed_up.svg"

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 900, 380, 110, 70, 46, 18
_SOLID, _LIGHT, _GRAY, _TEXT = "#2563a8", "#9dc1e6", "#6b7280", "#111827"


class Run(BaseModel):
    """Drafted over plain tokens per second, least and greatest of several runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    data: str
    b: int = Field(ge=1)
    least: float = Field(gt=0)
    greatest: float = Field(gt=0)
    command: str


class Results(BaseModel):
    """What a chart shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    machine: str
    source: str
    runs: tuple[Run, ...] = Field(min_length=1)


def svg(results: Results) -> str:
    """The chart as an SVG image that loads nothing. A bar is solid up to the least speed-up."""
    height = _TOP + _ROW * len(results.runs) + 34
    label = escape(f"{results.title}. {results.machine}.")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'font-family="sans-serif" font-size="13" role="img" aria-label="{label}">',
            f'<rect width="{_WIDTH}" height="{height}" rx="6" fill="white"/>',
            _text(16, 26, results.title, size=16),
            _text(16, 46, results.machine, _GRAY, size=12),
            *_bars(results.runs),
            _text(16, height - 12, f"{results.source}; {_commands(results.runs)}", _GRAY, size=11),
            "</svg>\n",
        ]
    )


def _bars(runs: tuple[Run, ...]) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / max(run.greatest for run in runs)
    for place, run in enumerate(runs):
        top = _TOP + place * _ROW
        middle = top + _BAR / 2 + 5
        speed_up = f"{run.least:g}" + (f" to {run.greatest:g}" if run.greatest > run.least else "")
        yield _text(_LEFT - 10, top + 9, f"{run.data}, b = {run.b}", anchor="end")
        yield _text(_LEFT - 10, top + 25, run.model, _GRAY, size=11, anchor="end")
        for length, colour in ((run.greatest, _LIGHT), (run.least, _SOLID)):
            yield (
                f'<rect x="{_LEFT}" y="{top}" width="{length * scale:.1f}" height="{_BAR}" '
                f'fill="{colour}"/>'
            )
        yield _text(_LEFT + run.greatest * scale + 8, middle, f"{speed_up} x")
    one, bottom = _LEFT + scale, _TOP + _ROW * len(runs) - 14
    yield (
        f'<line x1="{one:.1f}" y1="{_TOP - 8}" x2="{one:.1f}" y2="{bottom}" stroke="{_GRAY}" '
        'stroke-dasharray="4 3"/>'
    )
    yield _text(one, _TOP - 12, "plain", _GRAY, size=11, anchor="middle")


def _commands(runs: tuple[Run, ...]) -> str:
    return "made by " + ", ".join(dict.fromkeys(run.command for run in runs))


def _text(
    x: float,
    y: float,
    text: str,
    colour: str = _TEXT,
    *,
    size: int = 13,
    anchor: Literal["start", "middle", "end"] = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def read(path: Path = RESULTS) -> Results:
    return Results.model_validate(json.loads(path.read_text("utf-8")))


if __name__ == "__main__":
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    IMAGE.write_text(svg(read()), "utf-8")
