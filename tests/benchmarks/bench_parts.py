"""What benchmarks of several parts have in common: each part is a module, and measures and tables.

It prints the bars behind the tables, and measures nothing itself.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench_command import to_stderr

if TYPE_CHECKING:
    from draft_bars import Figure

WIDTH = 160


def measured(benchmark: str, parts: Sequence[str], asked: Any) -> dict[str, Any]:
    """The record of the parts ``BENCHMARK_PART``, each given what was asked."""
    from draft_tables import show_figures
    from rich.console import Console

    console, figures, found = Console(width=WIDTH), list["Figure"](), dict[str, Any]()
    for part in parts:
        to_stderr(f"{part} ...")
        measure: Callable[[Any, Console], tuple[list[Figure], dict[str, Any]]]
        measure = import_module(f"{benchmark}_{part}").measure
        own, found[part] = measure(asked, console)
        figures += own
    show_figures(console, figures)
    return {"figures": [figure.record for figure in figures], **found}
