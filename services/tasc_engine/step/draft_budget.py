"""How many draft tokens a step is worth, given what steps cost and what drafts have brought.

A token that is accepted with probability p brings p tokens; verifying it takes time in which the
engine would have emitted tokens anyway, at the rate it runs at. So it is drafted while p is above
that rate times its marginal seconds, which tends to the greatest tokens per second (Dinkelbach's
iteration for a ratio). Drafting itself takes time too: where a stretch of steps has not paid for
it, drafting pauses, twice as long each time, so that it is never much slower than not drafting.
Costs that are wrong where no draft ever goes would stay wrong, so now and then a step drafts all
that is likely, whatever its price. It makes no drafts and measures no forward.
"""

from dataclasses import dataclass
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_engine.stats import StepRecord
from tasc_engine.step.cost import StepCosts
from tasc_engine.step.live_costs import WRONG, LiveCosts
from tasc_engine.step.plan import Plan

Float32 = NDArray[np.float32]

FADE = 0.9  # of an average, per step
TRIAL = 8  # drafted steps before a verdict, and the first pause
LONGEST_PAUSE = 512  # steps
PROBE, LONGEST_PROBE = 32, 1024  # steps between two that draft all that is likely
LIKELY = 0.5
_CONTEXT_GRAIN, _TOKENS_GRAIN = 64, 8
_MOST_CURVES = 1024


@dataclass(frozen=True)
class Spent:
    """What one step spent and what it brought."""

    rows: int
    tokens: int  # that would have been there without drafts
    context: float
    drafted: int
    accepted: int
    emitted: int
    draft_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, plan: Plan, record: StepRecord) -> Self:
        """What a step spent, from its plan and its record."""
        accepted = int(record.accepted.sum())
        return cls(
            rows=len(plan.emitting),
            tokens=len(plan.tokens),
            context=plan.context,
            drafted=int(record.drafted.sum()),
            accepted=accepted,
            emitted=accepted + record.bonus_tokens + record.forced_tokens,
            draft_seconds=record.draft_seconds,
            verify_seconds=record.verify_seconds,
        )


class DraftBudget:
    """Decides before each step which draft tokens are worth verifying, and learns after it.

    Args:
        costs: Of steps. None where they are not known: then all draft tokens are worth verifying.
        most: Most draft tokens of a step, all rows together.
    """

    def __init__(self, costs: LiveCosts | None, most: int) -> None:
        self._costs = costs
        self._unprobed, self._probe_after, self._probing = 0, PROBE, False
        convex_steps(np.zeros(2))  # compiled before the first request waits for it
        self.begin_again(most)

    def begin_again(self, most: int) -> None:
        """Forget what drafts have brought: another proposer makes them from now on."""
        self._most = most
        self._rate = 0.0
        self._gain = 0.0
        self._tried = 0
        self._pause = self._paused = 0
        self._marginals: dict[tuple[int, int, int], tuple[float, Float32]] = {}
        self._table = self._costs.table if self._costs else None  # that they are of

    @property
    def learns(self) -> bool:
        """Whether it looks at what steps spent."""
        return self._costs is not None

    @property
    def cost_error(self) -> float:
        """By how much real steps differ from their costs; see `LiveCosts`."""
        return self._costs.error if self._costs else 0.0

    @property
    def paused(self) -> bool:
        """Whether the next step goes without drafts because the last ones did not pay."""
        return self._paused > 0 and not self._probing

    def min_probs(self, rows: int, tokens: int, context: float) -> Float32 | None:
        """The least probability at which each draft token of the next step pays.

        Args:
            rows: That emit tokens.
            tokens: Of the step without drafts.
            context: Mean length of the rows.

        Returns:
            ``float32[n]``; n may be 0. None where any token is worth it.
        """
        if self._costs is None:
            return None
        self._probing = self._unprobed >= self._probe_after and tokens == rows > 0
        if self.paused or rows == 0:
            return np.zeros(0, np.float32)
        plain, marginals = self._curve(self._costs.table, rows, tokens, context)
        rate = self._rate or rows / plain
        least = marginals * np.float32(rate)
        return np.minimum(least, np.float32(LIKELY)) if self._probing else least

    def time(self, spent: Spent) -> None:
        """Take in what a step took; a prompt's tokens cost less than drafts, and teach nothing."""
        if self._costs is None or spent.rows == 0 or spent.tokens > spent.rows:
            return
        drafted = spent.tokens + spent.drafted
        error = self._costs.correct(spent.rows, drafted, spent.context, spent.verify_seconds)
        if self._probing and spent.drafted:  # the less often, the more costs are right
            after = 2 * self._probe_after if abs(error) < WRONG / 2 else self._probe_after // 2
            self._probe_after = min(max(after, PROBE), LONGEST_PROBE)

    def learn(self, spent: Spent) -> None:
        """Take in what a step brought that was asked for drafts."""
        if self._costs is None or spent.rows == 0:
            return
        if self._probing:
            self._unprobed, self._probing = 0, False
            return  # what it brings for its price is not what drafts bring
        self._unprobed += 1
        plain, marginals = self._curve(self._costs.table, spent.rows, spent.tokens, spent.context)
        extra = float(marginals[: spent.drafted].sum()) + spent.draft_seconds
        rate = spent.emitted / (plain + extra)
        self._rate = FADE * self._rate + (1 - FADE) * rate if self._rate else rate
        if self.paused:
            self._paused -= 1
            return
        self._gain = FADE * self._gain + (spent.accepted - self._rate * extra)
        self._tried += 1
        if self._tried >= TRIAL and self._gain < 0:
            self._pause = min(max(2 * self._pause, TRIAL), LONGEST_PAUSE)
            self._paused, self._tried, self._gain = self._pause, TRIAL // 2, 0.0
        elif self._tried >= 2 * TRIAL:
            self._pause = 0

    def _curve(
        self, costs: StepCosts, rows: int, tokens: int, context: float
    ) -> tuple[float, Float32]:
        """Seconds of the step without drafts, and of each draft token more; never falling."""
        if costs is not self._table:
            self._table = costs
            self._marginals.clear()
        if tokens > 4 * rows:
            tokens = tokens // _TOKENS_GRAIN * _TOKENS_GRAIN
        key = (rows, tokens, int(context) // _CONTEXT_GRAIN)
        if key not in self._marginals:
            context = (key[2] + 0.5) * _CONTEXT_GRAIN
            grown = np.arange(tokens, tokens + self._most + 1, dtype=np.float64)
            seconds = costs.seconds(rows, grown, context)
            if len(self._marginals) >= _MOST_CURVES:
                self._marginals.clear()
            self._marginals[key] = float(seconds[0]), convex_steps(seconds)
        return self._marginals[key]


def convex_steps(values: NDArray[np.float64]) -> Float32:
    """``float32[n]`` slopes of the greatest convex curve below ``n + 1`` values; none negative.

    Where a cost jumps and then stays flat, each token bears its share of the jump.
    """
    slopes = np.zeros(len(values) - 1, np.float32)
    _convex(values, np.zeros(len(values), np.int64), slopes)
    return slopes


@numba.njit(cache=True, nogil=True)
def _convex(values: Any, corners: Any, slopes: Any) -> None:
    n = 1  # corners[0] is 0
    for i in range(1, len(values)):
        while n > 1:
            a, b = corners[n - 2], corners[n - 1]
            if (values[i] - values[b]) * (b - a) > (values[b] - values[a]) * (i - b):
                break
            n -= 1
        corners[n] = i
        n += 1
    for k in range(1, n):
        a, b = corners[k - 1], corners[k]
        slopes[a:b] = max((values[b] - values[a]) / (b - a), 0.0)
