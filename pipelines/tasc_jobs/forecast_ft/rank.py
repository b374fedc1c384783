"""How well one series tells the order of another: rank correlation, directions. Numbers only."""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau-b, in [-1, 1]: pairs in the same order less pairs in the opposite one, ties
    taken out (Kendall 1945). None where a series has less than two different values.
    """
    same = opposite = apart_one = apart_other = 0
    for (a, x), (b, y) in combinations(zip(one, other, strict=True), 2):
        apart_one += a != b
        apart_other += x != y
        same += (a < b and x < y) or (a > b and x > y)
        opposite += (a < b and x > y) or (a > b and x < y)
    if not apart_one or not apart_other:
        return None
    return (same - opposite) / math.sqrt(apart_one * apart_other)


def falls_at_rises(one: Sequence[float], other: Sequence[float]) -> tuple[int, int]:
    """How often ``one`` rises from a place to the next, and how often ``other`` falls then."""
    steps = list(zip(pairwise(one), pairwise(other), strict=True))
    rises = [after < before for (a, b), (before, after) in steps if b > a]
    return len(rises), sum(rises)
