"""Code that all benchmarks share: arguments, runs in turn, figures, tables and the JSON line.

Importing this module needs the standard library only; `rich` is imported where a table is printed.
"""

import argparse
import gzip
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 160  # of tables that do not go to a terminal

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


# Arguments and environment


def parser_of(module_doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring."""
    first, _, rest = (module_doc or "").partition("\n")
    return argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="file to which the JSON object is written, too")


def add_data(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument("--data", type=folder, required=required, help="folder of task data")


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    names = ",".join(parts)
    parser.add_argument(
        "--parts", type=names_of(*parts), default=parts, help=f"parts to run: {names} (all)"
    )


def add_repeats(parser: argparse.ArgumentParser, default: int, least: int = 1) -> None:
    parser.add_argument(
        "--repeats", type=at_least(least), default=default, help=f"timed runs ({default})"
    )


def listed(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def names_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """An argument type: a list of names, all of which must be known."""

    def parse(text: str) -> tuple[str, ...]:
        names = listed(text)
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} is unknown; there are {', '.join(known)}"
            )
        return names

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An argument type: a whole number that is not below ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}; at least {least} is needed")
        return value

    return number


def folder(text: str) -> Path:
    """An argument type: a folder that exists."""
    if not (path := Path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no folder")
    return path


def use_one_thread() -> None:
    """Make torch compute on one thread, here and in child processes; call it before the import."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")


def use_test_helpers(*modules: str) -> None:
    """Make the modules of ``tests/`` importable, and these of the folders below it."""
    tests = ROOT / "tests"
    below = [str(path.parent) for name in modules for path in tests.rglob(f"{name}.py")]
    sys.path[:0] = [*below, str(tests)]


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Runs


def in_turn(
    runs: Mapping[K, Callable[[], V]], repeats: int, tick: Callable[[], Any] = lambda: None
) -> dict[K, list[V]]:
    """Call every run once a repeat, in reverse order every other repeat.

    A machine that becomes slower or faster with time thus affects all runs alike.

    Args:
        tick: It is called after each run.
    """
    found: dict[K, list[V]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in runs if repeat % 2 == 0 else reversed(list(runs)):
            found[name].append(runs[name]())
            tick()
    return found


def ticked(value: T, tick: Callable[[], Any]) -> T:
    """Return the value; ``tick`` is called when the value has been computed."""
    tick()
    return value


# Figures


@dataclass(frozen=True)
class Figure:
    """A measured figure with its bar.

    Attributes:
        value: The figure; the median where it was measured repeatedly.
        bar: The required value; None where nothing is required.
        upwards: True if the figure must be at least the bar, False if at most.
        least, greatest: Extremes of the repeats; None without repeats.
    """

    name: str
    value: float
    unit: str
    bar: float | None = None
    upwards: bool = True
    least: float | None = None
    greatest: float | None = None

    @classmethod
    def of_runs(
        cls,
        name: str,
        runs: Sequence[float],
        unit: str,
        bar: float | None = None,
        upwards: bool = True,
    ) -> "Figure":
        """The median of repeated runs, with the least and the greatest."""
        return cls(name, median_of(runs), unit, bar, upwards, min(runs), max(runs))

    @property
    def passed(self) -> bool | None:
        if self.bar is None:
            return None
        return bool(self.value >= self.bar if self.upwards else self.value <= self.bar)

    @property
    def record(self) -> dict[str, Any]:
        """The figure as a JSON object."""
        return {**asdict(self), "passed": self.passed}


Measure = Callable[[Any], tuple[list[Figure], dict[str, Any]]]


def measured(measures: Mapping[str, Measure], parts: Sequence[str], options: Any) -> dict[str, Any]:
    """Run the parts of a benchmark, print their figures with the bars, and return the record."""
    figures, found = list[Figure](), dict[str, Any]()
    for part in parts:
        to_stderr(f"{part} ...")
        own, found[part] = measures[part](options)
        figures += own
    show_figures(figures)
    return {"figures": [figure.record for figure in figures], **found}


def median_of(values: Sequence[float]) -> float:
    """The median; of an even number of values the upper one."""
    return sorted(values)[len(values) // 2]


# Tables


def show_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str] | None]) -> None:
    """Print a table to stdout; None among the rows is a dividing line."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    _console().print(table)


def show_figures(figures: Sequence[Figure]) -> None:
    """Print each figure with its extremes, its bar, and whether the bar is met."""
    marks = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: ""}
    rows = []
    for f in figures:
        bar = f"{'>=' if f.upwards else '<='} {digits(f.bar)}" if f.bar is not None else ""
        values = map(digits, (f.value, f.least, f.greatest))
        rows.append([f.name, *values, bar, f.unit, marks[f.passed]])
    show_table("bars", ["figure", "measured", "least", "greatest", "bar", "", ""], rows)


def digits(value: float | None) -> str:
    """A number with about three significant digits; nothing for None."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


# Records and files


def finish(found: Mapping[str, Any], file: Path | None = None) -> None:
    """Print the line of JSON that a benchmark ends with; write it to the file as well, if any."""
    line = json.dumps(rounded(found))
    if file:
        file.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)


def about() -> dict[str, Any]:
    """The commit and the processor that a record is of."""
    return {"git": git_revision(), "processor": processor()}


def git_revision(checkout: Path = ROOT) -> dict[str, Any]:
    """The commit that is measured, and whether files differ from it."""
    head, changes = _git(checkout, "rev-parse", "HEAD"), _git(checkout, "status", "--porcelain")
    return {"revision": head, "changed": bool(changes)}


def processor() -> str:
    """The processor's name as Linux has it, otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python and of packages; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def rounded(value: Any) -> Any:
    """The same value with all floats rounded to four decimal places."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a compressed file with a JSON object in each line."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def write_json(file: Path, found: Mapping[str, Any]) -> None:
    """Write an object so that readers find all of it or the file that was there before."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(file)


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
