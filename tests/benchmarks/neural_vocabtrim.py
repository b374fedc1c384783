"""VocabTrim's tables (arXiv 2506.22694): block efficiency and memory-bound speed-up of a trimmed
head, by whose answers it was trimmed.

A memory-bound speed-up is block efficiency / (c g + 1): c is the drafter's parameters by the
target's, those of the shapes below. g is 4 for trees of three levels: the paper's own figures have
it so. A head of k of our V tokens is priced as the same share of the shapes' 128,256.
"""

from dataclasses import dataclass
from typing import Any

from bench_neural import Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FULL, VOCABTRIM, Bench, Policy
from neural_models import KINDS
from rich.console import Console

from tasc_engine.neural.card import Kind
from tasc_engine.neural.ranking import Origin

ORIGINS: tuple[Origin, ...] = ("raw", "target", "draft")
SHARES = (0.25, 0.01)  # of the vocabulary
VOCABULARY, _GAMMA = 128_256, 4
KEPT, GAIN, MOST_TOKENS = 0.97, 0.25, 5000


@dataclass(frozen=True)
class Shape:
    """Parameters in millions.

    Attributes:
        rest: Of an EAGLE head without embedding and LM head; its width is the target's.
    """

    target: float
    width: int
    rest: float


# From the models' configs: one layer, and what joins two vectors to one.
SHAPES = {
    "Llama-3.2-1B": Shape(1235.8, 2048, 60.8 + 8.4),
    "Llama-3.2-3B": Shape(3212.7, 3072, 100.7 + 18.9),
}
_INDEPENDENT = Shape(314.0, 1024, 314.0 - 131.3)  # the paper's own small model, its head tied


def speed_up(efficiency: float, shape: Shape, kind: Kind, share: float) -> float:
    """The memory-bound one, with a head of a share of the vocabulary."""
    own = shape if kind == "eagle" else _INDEPENDENT
    ends = VOCABULARY * own.width / 1e6
    drafter = own.rest + share * ends + (ends if kind == "eagle" else 0.0)
    return efficiency / (_GAMMA * drafter / shape.target + 1)


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    for kind in KINDS:
        table = table_of(
            f"VocabTrim, {kind} drafter, depth 3, top 8, 32 nodes: tokens a step (of the full "
            f"head's), memory-bound speed-up over the full head, {' and '.join(SHAPES)}",
            ["task", "full", "k", *(f"by {origin}" for origin in ORIGINS), "1B", "3B"],
        )
        for bench in asked.benches:
            own = found[f"{bench.case.name}, {kind}"] = _measure(bench, kind)
            for k, by in own["ranked"].items():
                cells = [f"{e:.2f} ({e / own['full']:.1%})" for e in by["efficiency"].values()]
                gains = [f"+{gain:.1%}" for gain in by["gains"].values()]
                table.add_row(bench.case.name, f"{own['full']:.2f}", str(k), *cells, *gains)
            figures += _figures(bench, kind, own)
        console.print(table)
    return figures, found


def _measure(bench: Bench, kind: Kind) -> dict[str, Any]:
    full = bench.neural(kind, FULL, VOCABTRIM, 0)
    assert full.equal, "answers changed"
    found: dict[str, Any] = {"full": full.efficiency, "ranked": {}}
    for share in SHARES:
        k = round(share * bench.vocab_size)
        by = {
            origin: bench.neural(kind, Policy(k, origin), VOCABTRIM, 0).efficiency
            for origin in ORIGINS
        }
        gains = {
            name: speed_up(by["target"], shape, kind, share)
            / speed_up(full.efficiency, shape, kind, 1.0)
            - 1
            for name, shape in SHAPES.items()
        }
        found["ranked"][k] = {"efficiency": by, "gains": gains}
    return found


def _figures(bench: Bench, kind: Kind, own: dict[str, Any]) -> list[Figure]:
    name, figures = f"{bench.case.name}, {kind}", []
    for k, by in own["ranked"].items():
        target = by["efficiency"]["target"]
        if k == round(SHARES[0] * bench.vocab_size):
            kept = target / own["full"]
            figures.append(Figure(f"{name}: tokens a step kept, head cut by 75 %", kept, "", KEPT))
        if bench.case.wide and k <= MOST_TOKENS and kind == "eagle":
            figures += [
                Figure(f"{name}: memory-bound speed-up gained, k = {k}, {shape}", gain, "", GAIN)
                for shape, gain in by["gains"].items()
            ]
    return figures
