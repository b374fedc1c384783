"""Kinds and moments of the batch benchmark's kills, and what each of them did."""

import random
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["driver", "engine", "redis"]
# From the first rows to the last, but not so late that the job ends before it is noticed.
_FROM, _TO = 0.05, 0.85


@dataclass(frozen=True)
class Fault:
    """What is to be killed once so many rows are done."""

    kind: Kind
    at_row: int


@dataclass(frozen=True)
class Hit:
    """A fault and what came of it.

    Attributes:
        done: Rows that were finished when it was made.
        left: Of these, those that still were when first looked at afterwards.
        recovery_seconds: Until a hundred rows more were finished than before.
    """

    kind: Kind
    done: int
    left: int
    recovery_seconds: float

    @property
    def redone(self) -> int:
        return max(0, self.done - self.left)


def planned(kills: int, seed: int, rows: int) -> list[Fault]:
    """So many faults in the order of their moments; each kind comes before one comes again."""
    chance = random.Random(seed)
    kinds: list[Kind] = []
    while len(kinds) < kills:
        more = list(get_args(Kind))
        chance.shuffle(more)
        kinds += more
    moments = sorted(chance.uniform(_FROM, _TO) for _ in range(kills))
    return [Fault(kind, round(at * rows)) for kind, at in zip(kinds, moments, strict=False)]
