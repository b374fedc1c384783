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

RANKED_SHARE, BASE_SHARE, BASE_MOST = 0.25, 0.125, 1000
ABLATIONS = (
    Policy(recent=True, extension=False),
    Policy(recent=True, context=False),
    Policy(recent=True, gathered=False),
)
FASTER, ACTIVE, COVERED = 1.3, 2000, 0.97
_HEADINGS = ["task", "vocabulary", "active", "coverage", "tokens a step", "draft ms", "verify ms",
             "tokens/s (least-greatest)", "ceiling"]  # fmt: skip


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    title = "MicroSpec, EAGLE head, depth 5, 60 nodes, b = 8"
    table = table_of(title, _HEADINGS)
    for bench in asked.benches:
        sides = {policy: bench.neural("eagle", policy, MICROSPEC, bench.repeats)
                 for policy in _policies(bench)}  # fmt: skip
        assert all(side.equal for side in sides.values()), "answers changed"
        for policy, side in sides.items():
            table.add_row(bench.case.name, policy.name, *_cells(side, sides[FULL]))
        table.add_section()
        found[bench.case.name] = {policy.name: asdict(side) for policy, side in sides.items()}
        figures += _figures(bench, sides)
    console.print(table)
    return figures, found


def _policies(bench: Bench) -> list[Policy]:
    size = bench.vocab_size
    base = Policy(min(BASE_MOST, round(BASE_SHARE * size)), recent=True)
    ranked = Policy(round(RANKED_SHARE * size)), Policy(base.ranked)
    return [FULL, *ranked, RECENT, base, *(ABLATIONS if bench.case.wide else ())]


def _cells(side: Measured, full: Measured) -> list[str]:
    ceiling = side.tokens_s * full.efficiency / side.efficiency
    return [
        f"{side.size:,.0f}", f"{side.coverage:.1%}", f"{side.efficiency:.2f}",
        f"{side.draft_ms:.1f}", f"{side.verify_ms:.1f}",
        f"{side.tokens_s:.0f} ({side.least:.0f}-{side.greatest:.0f})", f"{ceiling:.0f}",
    ]  # fmt: skip


def _figures(bench: Bench, sides: dict[Policy, Measured]) -> list[Figure]:
    name, full = bench.case.name, sides[FULL]
    both = next(side for policy, side in sides.items() if policy.recent and policy.ranked)
    figures = [
        Figure(f"{name}: active tokens of recent over ranked", both.size or 0.0, "", ACTIVE, False),
        Figure(f"{name}: coverage of recent over ranked", both.coverage or 0.0, "", COVERED),
    ]
    if bench.case.wide:
        pruned = {
            policy: side for policy, side in sides.items() if policy not in (FULL, *ABLATIONS)
        }
        best = max(pruned.values(), key=lambda side: side.tokens_s)
        figures.append(Figure(
            f"{name}: tokens/s of the best pruned head / full", best.tokens_s / full.tokens_s, "x",
            FASTER, least=best.least / full.greatest, greatest=best.greatest / full.least,
        ))  # fmt: skip
    return figures
