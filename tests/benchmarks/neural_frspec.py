"""FR-Spec's table (arXiv 2502.14856): accepted length and speed by how much of the head is left."""

from typing import Any

from bench_neural import Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FR_SPEC, FULL, Policy
from rich.console import Console

LEFT, FEW = 0.25, (1024, 256, 64)  # of the head: this share at most, and so many tokens


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    found = dict[str, Any]()
    table = table_of(
        "FR-Spec, EAGLE head, depth 6, 60 nodes, ranked by the target's answers",
        ["task", "tokens", "accepted length", "of the full head's", "tokens/s (least-greatest)",
         "over the full head's"],
    )  # fmt: skip
    for bench in asked.benches:
        sizes = bench.sizes(round(LEFT * bench.vocab_size), *FEW)
        sides = {
            policy.ranked or bench.vocab_size: bench.neural("eagle", policy, FR_SPEC, bench.repeats)
            for policy in (FULL, *map(Policy, sizes))
        }
        full = sides[bench.vocab_size]
        for size, side in sides.items():
            table.add_row(
                bench.case.name, f"{size:,}", f"{side.length:.2f}",
                f"{side.length / full.length:.1%}",
                f"{side.tokens_s:.0f} ({side.least:.0f}-{side.greatest:.0f})",
                f"{side.tokens_s / full.tokens_s:.2f}",
            )  # fmt: skip
        table.add_section()
        found[bench.case.name] = {
            size: {"length": side.length, "tokens_s": side.tokens_s} for size, side in sides.items()
        }
    console.print(table)
    return [], found
