"""MicroSpec's tables (arXiv 2605.26444): vocabularies by size, coverage, times and speed; what its
window takes its tokens from; and what no paper has, a window beside a ranked vocabulary.

The ceiling is the full head's tokens a step at the pruned head's cost of one.
"""

from dataclasses import asdict
from typing import Any

from bench_neural import Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FULL, MICROSPEC, RECENT, Bench, Policy
from neural_side import Measured
from rich.console import Console

LEFT, BASES = 0.25, (1024, 256)
ABLATIONS = (
    Policy(recent=True, extension=False),
    Policy(recent=True, context=False),
    Policy(recent=True, gathered=False),
)
FASTER, ACTIVE, COVERED = 1.3, 2000, 0.97
_HEADINGS = ["task", "vocabulary", "active", "coverage", "accepted length", "draft ms", "verify ms",
             "tokens/s (least-greatest)", "ceiling"]  # fmt: skip


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    title = "MicroSpec, EAGLE head, depth 5, 60 nodes, b = 8"
    table = table_of(title, _HEADINGS)
    for bench in asked.benches:
        sides = {policy: bench.neural("eagle", policy, MICROSPEC, bench.repeats)
                 for policy in _policies(bench)}  # fmt: skip
        for policy, side in sides.items():
            table.add_row(bench.case.name, policy.name, *_cells(side, sides[FULL]))
        table.add_section()
        found[bench.case.name] = {policy.name: asdict(side) for policy, side in sides.items()}
        figures += _figures(bench, sides)
    console.print(table)
    return figures, found


def _policies(bench: Bench) -> list[Policy]:
    ranked = bench.sizes(round(LEFT * bench.vocab_size), *BASES)
    unions = [Policy(k, recent=True) for k in bench.sizes(*BASES)]
    ablations = ABLATIONS if bench.case.wide else ()
    return [FULL, *map(Policy, ranked), RECENT, *unions, *ablations]


def _cells(side: Measured, full: Measured) -> list[str]:
    ceiling = side.tokens_s * full.efficiency / side.efficiency
    return [
        f"{side.size:,.0f}", f"{side.coverage:.1%}", f"{side.length:.2f}",
        f"{side.draft_ms:.1f}", f"{side.verify_ms:.1f}",
        f"{side.tokens_s:.0f} ({side.least:.0f}-{side.greatest:.0f})", f"{ceiling:.0f}",
    ]  # fmt: skip


def _figures(bench: Bench, sides: dict[Policy, Measured]) -> list[Figure]:
    """Of the larger ranked vocabulary with a window, and of the largest without one."""
    name, full = bench.case.name, sides[FULL]
    union = next(policy for policy in sides if policy.recent and policy.ranked)
    ranked = next(policy for policy in sides if policy.ranked and not policy.recent)
    size, coverage = sides[union].size or 0.0, sides[union].coverage or 0.0
    figures = [
        Figure(f"{name}: active tokens of {union.name}", size, "", ACTIVE, False),
        Figure(f"{name}: coverage of {union.name}", coverage, "", COVERED),
    ]
    for policy in (ranked, union, RECENT) if bench.case.wide else ():
        side = sides[policy]
        figures.append(Figure(
            f"{name}: tokens/s of {policy.name} / full", side.tokens_s / full.tokens_s, "x",
            FASTER, least=side.least / full.greatest, greatest=side.greatest / full.least,
        ))  # fmt: skip
    return figures
