"""What sides of proposers come to: a table a task, and the papers' figures. It measures nothing."""

from collections.abc import Collection
from dataclasses import dataclass

from draft_bars import Figure, geometric_mean
from draft_tables import table_of
from neural_task import SMALL, TREE, Measured
from rich.console import Console

KEPT, MBSU, COVERED, ACTIVE, BETTER, ON_TASKS = 0.97, 1.25, 0.97, 2000, 1.1, 4


@dataclass(frozen=True)
class Shape:
    """A model whose costs stand in for the toy's: with toy shapes the ratio means nothing."""

    name: str
    hidden: int
    intermediate: int
    kv: int
    vocab: int
    parameters: float

    def cost(self, head_rows: int) -> float:
        """c: an EAGLE head's parameters, its ends included, by the target's."""
        layer = 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.intermediate
        ends = (self.vocab + head_rows) * self.hidden
        return (layer + 2 * self.hidden**2 + ends) / self.parameters


SHAPES = (
    Shape("Llama-3.2-1B", 2048, 8192, 512, 128_256, 1.2358e9),
    Shape("Llama-3.2-3B", 3072, 8192, 1024, 128_256, 3.2128e9),
)


def mbsu(shape: Shape, block_efficiency: float, head_rows: int) -> float:
    """Memory-bound speed-up (VocabTrim, arXiv 2506.22694): tokens by bytes read of weights."""
    return block_efficiency / (shape.cost(head_rows) * TREE.depth + 1)


def show(console: Console, found: Measured) -> None:
    columns = ["proposer", "tokens/step", "same answers", "tokens/s", "draft ms", "verify ms",
               "vocabulary", "coverage %", "MBSU 1B", "by position, %"]  # fmt: skip
    table = table_of(f"{found.task}: {found.rows} test rows, {TREE.nodes} nodes", columns)
    for side in found.sides:
        drawn = side.vocabulary > 0
        same = sum(map(tuple.__eq__, side.answers, found.sides[0].answers))
        rows = min(round(side.vocabulary), SHAPES[0].vocab)
        table.add_row(
            side.name, f"{side.block_efficiency:.2f}", f"{same}", f"{side.tokens_per_second:.0f}",
            f"{side.draft_ms:.2f}", f"{side.verify_ms:.2f}",
            f"{side.vocabulary:.0f}" if drawn else "",
            f"{100 * side.coverage:.1f}" if drawn else "",
            f"{mbsu(SHAPES[0], side.block_efficiency, _head_rows(found, side.name, rows)):.2f}"
            if side.name.startswith("eagle") else "",
            " ".join(f"{100 * rate:.0f}" for rate in side.by_position[:6]),
        )  # fmt: skip
    console.print(table)


def figures_of(tasks: Collection[Measured]) -> list[Figure]:
    """The bars, by geometric means over the tasks."""
    kept = [_kept(each, f"eagle target:{each.cut}") for each in tasks]
    small = [_kept(each, f"eagle target:{SMALL}") for each in tasks]
    raw = [_kept(each, f"eagle raw:{SMALL}") for each in tasks]
    union = [each.side(f"eagle recent:{SMALL}") for each in tasks]
    hybrids = [_hybrid(each) for each in tasks]
    same = sum(all(s.answers == each.sides[0].answers for s in each.sides) for each in tasks)
    figures = [
        Figure("tasks whose answers are the same with every proposer", same, "tasks", len(tasks)),
        Figure("acceptance length kept, head cut by 75 %, target-made ranking",
               geometric_mean(kept), "x", KEPT),
        Figure(f"the same with {SMALL} tokens", geometric_mean(small), "x"),
        Figure(f"the same with {SMALL} tokens of raw outputs", geometric_mean(raw), "x"),
        Figure(f"recent over {SMALL} ranked: coverage, the worst task",
               min(s.coverage for s in union), "", COVERED),
        Figure("the same: active tokens, the most", max(s.vocabulary for s in union), "", ACTIVE,
               upwards=False),
        Figure("tasks on which the hybrid is 1.1 x its better part",
               sum(ratio >= BETTER for ratio in hybrids), "tasks",
               ON_TASKS if len(tasks) == 6 else None),
    ]  # fmt: skip
    for shape in SHAPES:
        pruned = mbsu(shape, 1.0, SMALL) / mbsu(shape, 1.0, shape.vocab)
        gain = [pruned * ratio for ratio in small]
        figures.append(
            Figure(f"MBSU gain of {SMALL} ranked tokens, {shape.name}", geometric_mean(gain), "x",
                   MBSU)
        )  # fmt: skip
    return figures


def _kept(found: Measured, name: str) -> float:
    return found.side(name).block_efficiency / found.side("eagle full").block_efficiency


def _hybrid(found: Measured) -> float:
    """The better hybrid over the better of its own parts."""
    ngrams = found.side("n-grams").block_efficiency
    return max(
        found.side(f"hybrid {kind}").block_efficiency
        / max(ngrams, found.side(f"{kind} full").block_efficiency)
        for kind in ("eagle", "independent")
    )


def _head_rows(found: Measured, name: str, active: int) -> int:
    return SHAPES[0].vocab if name == "eagle full" else active
