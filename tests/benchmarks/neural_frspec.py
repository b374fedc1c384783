"""FR-Spec's table (arXiv 2502.14856): accepted length and speed by how much of the head is left."""

from typing import Any

from bench_neural import Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FR_SPEC, FULL, Policy
from rich.console import Console

SHARES = (0.25, 0.125, 0.0625)  # of the vocabulary: the paper's 32k, 16k and 8k of 128k


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    found = dict[str, Any]()
    table = table_of(
        "FR-Spec, EAGLE head, depth 6, 60 nodes: tokens a step (of the full head's), tokens a "
        "second",
        ["task", "full", *(f"{share:.2%}" for share in SHARES)],
    )
    for bench in asked.benches:
        policies = [FULL, *(Policy(round(share * bench.vocab_size)) for share in SHARES)]
        sides = [bench.neural("eagle", each, FR_SPEC, bench.repeats) for each in policies]
        assert all(side.equal for side in sides), "answers changed"
        most = sides[0].efficiency
        table.add_row(bench.case.name, *(
            f"{s.efficiency:.2f} ({s.efficiency / most:.1%}), {s.tokens_s:.0f}" for s in sides
        ))  # fmt: skip
        found[bench.case.name] = {
            policy.name: {"efficiency": side.efficiency, "tokens_s": side.tokens_s}
            for policy, side in zip(policies, sides, strict=True)
        }
    console.print(table)
    return [], found
