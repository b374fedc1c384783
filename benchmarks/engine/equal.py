"""Whether drafts change answers: in float32 against transformers, in bf16 against no drafts.

The order of float32 sums differs, so two tokens whose logits differ by less than NEAR may change
places. bf16 has 8 bits: logits between 16 and 32 are 0.125 apart, and another order of the sum
moves a logit by one or two of these steps. TOLERANCE is two steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

NEAR = 1e-5
TOLERANCE = 0.25

Answers = Sequence[list[int]]
# Computes the difference of the two greatest logits of the model after each prefix.
Judge = Callable[[Answers], list[float]]


@dataclass(frozen=True)
class Difference:
    """The first place where two answers of a row differ, and the model's margin there."""

    row: int
    place: int
    margin: float


@dataclass(frozen=True)
class Equality:
    """A comparison of two sides' answers to the same rows.

    Attributes:
        compared: Tokens up to and including each first difference.
        limit: A difference with a margin above it is not a near-tie.
    """

    rows: int
    compared: int
    differences: tuple[Difference, ...]
    limit: float

    @property
    def identical(self) -> float:
        """The share of rows with equal answers; near-ties count as different."""
        return 1 - len(self.differences) / self.rows

    @property
    def per_token(self) -> float:
        return len(self.differences) / self.compared

    @property
    def above(self) -> int:
        return sum(d.margin > self.limit for d in self.differences)

    @property
    def greatest_margin(self) -> float:
        return max((d.margin for d in self.differences), default=0.0)


def compare(
    ours: Answers, others: Answers, prompts: Sequence[list[int]], judge: Judge, limit: float
) -> Equality:
    """Compare answers; ``judge`` is called only where they differ."""
    places = [first_difference(a, b) for a, b in zip(ours, others, strict=True)]
    rows = [i for i, place in enumerate(places) if place is not None]
    cut = [(row, place) for row in rows if (place := places[row]) is not None]
    margins = judge([[*prompts[r], *others[r][:p]] for r, p in cut]) if cut else []
    compared = sum(len(a) if p is None else p + 1 for a, p in zip(ours, places, strict=True))
    found = tuple(Difference(r, p, m) for (r, p), m in zip(cut, margins, strict=True))
    return Equality(len(places), compared, found, limit)


def first_difference(a: list[int], b: list[int]) -> int | None:
    for place, (x, y) in enumerate(zip_longest(a, b)):
        if x != y:
            return place
    return None
