"""Corrects step costs by the times of real steps while an engine serves.

Costs that were measured in a busy moment are wrong, above all the costs of long forwards, which are
interrupted more often than short forwards. Each step moves the measured points from which its own
cost was interpolated (least mean squares, in logarithms). The estimate is a mean, since minima have
the same fault on a machine that stays busy.

Four rules limit the effect of a slow step or a busy second. An error counts for a factor of at most
four. A point moves more slowly the more steps it has seen. Points that moved little do not change
the table. The file is written only after costs have been wrong for a thousand steps.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace

from tasc_engine.step.cost import Conditions, StepCosts

BOUND = math.log(4.0)  # maximum error of one step that counts
MAX_SHARE = 2.0  # maximum share of a point; shares are larger far beyond the last point
TRUST = 8.0  # number of steps that a measured point counts as
MIN_RATE = 1 / 64  # rate of a point that many steps have moved
LOOK = 64  # steps without prompt tokens between two checks of moved points
MOVED = math.log(1.1)  # a point that moved this far changes the table
WRONG = math.log(4 / 3)  # distance of a point from the file that counts as wrong
WRONG_LOOKS = 16  # consecutive checks with a wrong point before the file is written
_FADE = 0.98  # factor per step of the mean error

Curve = tuple[int, list[int]]  # index of its first point, and the tokens of all points


class LiveCosts:
    """A table of step costs that follows the times of real steps.

    Args:
        keep: Saves a table; called after the costs have differed by more than a third for long.

    Attributes:
        table: The current costs; replaced by another object when they change.
    """

    def __init__(self, costs: StepCosts, keep: Callable[[StepCosts], None] | None = None) -> None:
        ordered = tuple(sorted(costs.costs, key=lambda c: (c.rows, c.context, c.tokens)))
        self.table = self._kept = replace(costs, costs=ordered)
        self._keep = keep
        self._seconds = [c.seconds for c in ordered]
        self._seen = [0.0] * len(ordered)
        self._error, self._steps, self._wrong = 0.0, 0, 0
        self._curves: dict[int, dict[int, Curve]] = {}
        for i, c in enumerate(ordered):
            self._curves.setdefault(c.rows, {}).setdefault(c.context, (i, []))[1].append(c.tokens)

    @property
    def error(self) -> float:
        """Mean difference of real steps from the table: 0.1 is 10 %; 3 is the maximum."""
        return math.expm1(self._error)

    def expected(self, rows: int, tokens: int, context: float) -> float:
        """Returns the seconds of a step by the corrected costs."""
        return self._expected(self._points(rows, tokens, context))

    def correct(self, rows: int, tokens: int, context: float, seconds: float) -> float:
        """Corrects the costs by a step's seconds.

        Returns the logarithm of the ratio of real to expected seconds.
        """
        points = self._points(rows, tokens, context)
        expected = self._expected(points)
        error = math.log(max(seconds, 1e-9) / expected)
        bounded = min(max(error, -BOUND), BOUND)
        self._error += (1 - _FADE) * (abs(bounded) - self._error)
        for i, end, part in points:
            share = min(max(part, -MAX_SHARE), MAX_SHARE)
            factor = math.exp(bounded * share * max(1 / (TRUST + self._seen[i]), MIN_RATE))
            self._seen[i] += abs(share)
            self._seconds[i] *= factor
            for unseen in range(i + 1, end):  # points with few steps are equally wrong
                self._seconds[unseen] *= factor if self._seen[unseen] < TRUST else 1.0
        self._steps += 1
        if self._steps % LOOK == 0:
            self._look()
        return error

    def _expected(self, points: Iterable[tuple[int, int, float]]) -> float:
        return max(sum(share * self._seconds[i] for i, _, share in points), 1e-9)

    def _points(self, rows: int, tokens: int, context: float) -> list[tuple[int, int, float]]:
        """Returns the points from which `StepCosts.seconds` interpolates this shape.

        Each point has its index, the end of the following points that it represents, and its share.
        """
        near = min(self._curves, key=lambda known: (abs(known - rows), known))
        curves = list(self._curves[near].items())
        (low, first), (high, last) = curves[0], curves[-1]
        part = min(max((context - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        found = []
        for (begin, known), weight in ((first, 1 - part), (last, part)):
            end, i = begin + len(known), min(bisect_right(known, tokens), len(known) - 1)
            if i == 0 or tokens <= known[0]:  # flat before the first point
                found.append((begin, begin + 1 if i else end, weight))
                continue
            share = (tokens - known[i - 1]) / (known[i] - known[i - 1])
            found.append((begin + i - 1, begin + i, weight * (1 - share)))
            found.append((begin + i, end, weight * share))
        return [point for point in found if point[2]]

    def _look(self) -> None:
        costs = zip(self.table.costs, self._seconds, strict=True)
        now = replace(self.table, costs=tuple(replace(c, seconds=s) for c, s in costs))
        if _apart(now, self.table) > MOVED:
            self.table = now
        self._wrong = self._wrong + 1 if _apart(now, self._kept) > WRONG else 0
        if self._wrong >= WRONG_LOOKS and self._keep:
            self._kept = replace(now, measured=Conditions(real_steps=self._steps))
            self._keep(self._kept)


def _apart(left: StepCosts, right: StepCosts) -> float:
    """The logarithm of the largest factor between two points of one shape."""
    pairs = zip(left.costs, right.costs, strict=True)
    return max(abs(math.log(a.seconds / b.seconds)) for a, b in pairs)
