"""VocabTrim's tables (arXiv 2506.22694): accepted length and memory-bound speed-up of a trimmed
head, by whose answers it was trimmed.

A memory-bound speed-up is the tokens of a step / (c g + 1): c is the drafter's parameters by the
target's, those of the shapes below; g the drafter's forwards. A head of k of our V tokens is priced
as the same share of the shapes' 128,256.
"""

from dataclasses import dataclass
from typing import Any

from bench_neural import KINDS, Asked
from draft_bars import Figure
from draft_tables import table_of
from neural_bench import FULL, VOCABTRIM, Bench, Policy
from rich.console import Console

from tasc_engine.neural.card import Kind
from tasc_engine.neural.ranking import Origin

ORIGINS: tuple[Origin, ...] = ("raw", "target", "draft")
LEFT, FEW = 0.25, (256, 64)  # of the head: this share at most, and so many tokens
VOCABULARY = 128_256
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


def speed_up(length: float, shape: Shape, kind: Kind, share: float) -> float:
    """The memory-bound one, with a head of a share of the vocabulary."""
    own = shape if kind == "eagle" else _INDEPENDENT
    ends = VOCABULARY * own.width / 1e6
    drafter = own.rest + share * ends + (ends if kind == "eagle" else 0.0)
    return length / (VOCABTRIM.depth * drafter / shape.target + 1)


def measure(asked: Asked, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    figures, found = list[Figure](), dict[str, Any]()
    for kind in KINDS:
        if not (benches := [bench for bench in asked.benches if kind in bench.case.kinds]):
            continue
        table = table_of(
            f"VocabTrim, {kind} drafter, 4 levels, top 8, 32 nodes: accepted length (of the full "
            f"head's) by whose answers rank, memory-bound speed-up (over the full head's)",
            ["task", "full", "k", *ORIGINS, *SHAPES],
        )
        for bench in benches:
            own = found[f"{bench.case.name}, {kind}"] = _measure(bench, kind)
            for k, by in own["ranked"].items():
                lengths = [by["length"].get(origin) for origin in ORIGINS]
                cells = [f"{e:.2f} ({e / own['full']:.1%})" if e else "" for e in lengths]
                gains = [f"{by['speed_up'][s]:.2f} (+{by['gains'][s]:.1%})" for s in SHAPES]
                table.add_row(bench.case.name, f"{own['full']:.2f}", str(k), *cells, *gains)
            table.add_section()
            figures += _figures(bench, kind, own)
        console.print(table)
    return figures, found


def _measure(bench: Bench, kind: Kind) -> dict[str, Any]:
    full = bench.neural(kind, FULL, VOCABTRIM, 0).length
    found: dict[str, Any] = {"full": full, "ranked": {}}
    for k in bench.sizes(round(LEFT * bench.vocab_size), *FEW):
        by = {
            origin: bench.neural(kind, Policy(k, origin), VOCABTRIM, 0).length
            for origin in _origins(bench)
        }
        after, before = (
            {name: speed_up(length, shape, kind, share) for name, shape in SHAPES.items()}
            for length, share in ((by["target"], k / bench.vocab_size), (full, 1.0))
        )
        gains = {name: after[name] / before[name] - 1 for name in SHAPES}
        found["ranked"][k] = {"length": by, "speed_up": after, "gains": gains}
    return found


def _origins(bench: Bench) -> tuple[Origin, ...]:
    """A draft model's answers are those of an independent drafter."""
    return ORIGINS if "independent" in bench.case.kinds else ("raw", "target")


def _figures(bench: Bench, kind: Kind, own: dict[str, Any]) -> list[Figure]:
    """Of the largest ranked vocabulary."""
    name, (k, by) = f"{bench.case.name}, {kind}", next(iter(own["ranked"].items()))
    kept = by["length"]["target"] / own["full"]
    figures = [Figure(f"{name}: accepted length kept by {k} of {bench.vocab_size} tokens", kept, "",
                      KEPT)]  # fmt: skip
    if kind == "eagle" and k <= MOST_TOKENS:
        figures += [
            Figure(f"{name}: memory-bound speed-up gained by {k} tokens, {shape}", gain, "", GAIN)
            for shape, gain in by["gains"].items()
        ]
    return figures
