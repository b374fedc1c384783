"""The engine benchmark's tables for people. It computes no figure."""

from collections.abc import Sequence
from statistics import median

from draft_tables import digits, table_of
from engine_ceiling import Ceiling
from engine_equal import Equality
from engine_figures import (
    Found,
    block_efficiency,
    milliseconds,
    shares,
    speeds,
    step_ms,
)
from engine_sides import Measured
from rich.console import Console

HEADINGS = ("", "tokens/s", "least", "greatest", "step ms", "block eff.", "draft %", "verify %",
            "rest %", "p50 ms", "p99 ms", "first p50 ms", "peak MB")  # fmt: skip
_SHOWN = 5  # differences of a comparison


def show_task(console: Console, found: Found) -> None:
    """All settings of a task beside the ceiling of plain steps."""
    title = f"{found.task}: medians of {len(found.measured[0].runs)} runs"
    table = table_of(title, HEADINGS)
    for measured in found.measured:
        table.add_row(measured.name, *map(cell, cells(measured)))
    table.add_section()
    top = found.ceiling
    table.add_row(
        f"ceiling, plain b={top.batch}", digits(top.tokens_per_second), "", "",
        digits(1000 * top.step_seconds), *[""] * (len(HEADINGS) - 5),
    )  # fmt: skip
    console.print(table)
    show_ceiling(console, top)


def cells(measured: Measured) -> list[float | None]:
    per_second = speeds(measured)
    percents = [
        None if None in parts else 100 * median(p for p in parts if p is not None)
        for parts in zip(*map(shares, measured.runs), strict=True)
    ]
    return [
        median(per_second), min(per_second), max(per_second), step_ms(measured),
        block_efficiency(measured), *percents, milliseconds(measured, "latency", 50),
        milliseconds(measured, "latency", 99), milliseconds(measured, "first", 50),
        measured.memory_mb,
    ]  # fmt: skip


def show_ceiling(console: Console, top: Ceiling) -> None:
    console.print(
        f"ceiling: {top.weight_bytes / 1e6:.1f} MB of weights at {top.bandwidth / 1e9:.1f} GB/s, "
        f"{2 * top.weights * top.batch / 1e6:.0f} Mop a step at {top.rate / 1e9:.0f} Gop/s: "
        f"{top.steps_per_second:.0f} steps/s"
    )


def show_equality(console: Console, name: str, found: Equality) -> None:
    console.print(
        f"{name}: {found.identical:.4f} of {found.rows} rows equal; {len(found.differences)} first "
        f"differences in {found.compared} tokens, greatest margin {found.greatest_margin:.3g}, "
        f"{found.above} above {found.limit:g}"
    )
    for d in sorted(found.differences, key=lambda d: -d.margin)[:_SHOWN]:
        console.print(f"  row {d.row}, token {d.place}: margin {d.margin:.3g}")


def cell(value: float | None) -> str:
    return "" if value is None else digits(value)


def show_steps(console: Console, title: str, rows: Sequence[tuple[str, float]]) -> None:
    """Milliseconds of steps of random weights."""
    table = table_of(title, ["step", "ms"])
    for name, ms in rows:
        table.add_row(name, digits(ms))
    console.print(table)
