"""What the demo prints: tables and a bar chart for people, one JSON object for machines."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tasc_jobs.demo.measure import DemoFigures, latency_ms, tokens_per_second
from tasc_jobs.evaluate.quality import IntentQuality
from tasc_jobs.statistics.task_statistics import CorpusStatistics

_BAR_CELLS = 30


def show_statistics(console: Console, task: str, found: CorpusStatistics) -> None:
    """How variable the task is (Tsur et al. 2026, arXiv 2602.24174, Table 1)."""
    table = Table(title=f"{task}: statistics of the training corpus", title_justify="left")
    for heading in ("", "rows", "words", "bigram entropy, bits", "bigrams for 80 %"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, side in (("inputs", found.input), ("outputs", found.output)):
        table.add_row(
            name,
            f"{side.rows:,}",
            f"{side.words.count:,}",
            f"{side.words.ngrams.shannon_bits:.2f}",
            f"{side.words.ngrams.ngrams_for_80_percent:,}",
        )
    console.print(table)


def summary(measured: DemoFigures, identical: int, quality: IntentQuality) -> dict[str, Any]:
    """The demo's last line."""
    sides = {
        "plain": measured.http[False],
        "drafted": measured.http[True],
        "engine_plain": measured.engine[False],
        "engine_drafted": measured.engine[True],
    }
    return {
        "rows": len(measured.http[True][0].texts),
        "identical": identical,
        "block_efficiency": round(measured.counters.block_efficiency, 3),
        "acceptance_by_position": [round(a, 3) for a in measured.counters.acceptance_by_position],
        "tokens_per_second": {k: round(tokens_per_second(v), 1) for k, v in sides.items()},
        "latency_ms": {k: latency_ms(v) for k, v in sides.items()},
        "quality": {k: round(v, 4) for k, v in asdict(quality).items()},
    }


def show_summary(console: Console, found: dict[str, Any]) -> None:
    speeds = found["tokens_per_second"]
    table = Table(title="plain against drafted", title_justify="left")
    for heading in ("", "tokens/s", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(heading, justify="right" if heading else "left")
    for side, label in (
        ("plain", "HTTP, plain"),
        ("drafted", "HTTP, drafted"),
        ("engine_plain", "engine alone, plain"),
        ("engine_drafted", "engine alone, drafted"),
    ):
        times = found["latency_ms"][side].values()
        table.add_row(label, f"{speeds[side]:,.0f}", *(f"{t:.1f}" for t in times))
    console.print(table)
    _show_acceptance(console, found["acceptance_by_position"])
    console.print(
        f"speed-up            engine {speeds['engine_drafted'] / speeds['engine_plain']:.2f} x, "
        f"HTTP {speeds['drafted'] / speeds['plain']:.2f} x"
    )
    console.print(f"block efficiency    {found['block_efficiency']:.2f} tokens per row and forward")
    quality = ", ".join(f"{k.replace('_', ' ')} {v:.1%}" for k, v in found["quality"].items())
    console.print(f"quality             {quality}")
    console.print(f"identical: {found['identical']}/{found['rows']}")


def _show_acceptance(console: Console, rates: list[float]) -> None:
    console.print("acceptance by draft position")
    for position, rate in enumerate(rates):
        bar = "█" * round(rate * _BAR_CELLS)
        console.print(f"  {position:>2}  {bar:<{_BAR_CELLS}}  {rate:6.1%}", highlight=False)
