"""Computes which draft tokens are worth verifying, from the costs of steps and past acceptance.

A draft token that is accepted with probability p saves p forwards of its row on average. Verifying
the token takes time, in which the engine could do other forwards at its current rate. The token is
worth drafting if p exceeds this rate times the seconds that the token adds. Applied to every step,
this rule approaches the highest rate (Dinkelbach's method for ratios). Tokens that a guide forces
need no forward, drafted or not, so they do not count. If drafting has not paid for a while, it
pauses, twice as long each time. Now and then a step is a probe: it drafts all likely tokens
whatever their cost, because wrong costs would otherwise stay unnoticed. This module neither makes
drafts nor measures forward passes.
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

FADE = 0.9  # factor per step of the running averages
TRIAL = 8  # drafted steps before drafting may pause
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 512  # steps; short at first, while the weights still learn
PROBE, LONGEST_PROBE = 32, 1024  # steps between two probes
LIKELY = 0.5
_CONTEXT_GRAIN, _TOKENS_GRAIN = 64, 8
_MAX_CURVES = 1024


@dataclass(frozen=True)
class Decision:
    """The kind of a step, other than an ordinary drafted step.

    Attributes:
        probes: The step drafts all likely tokens, whatever their cost.
        paused: The step does not draft, because recent drafts did not pay.
    """

    probes: bool = False
    paused: bool = False


@dataclass(frozen=True)
class Spent:
    """The costs and results of one step; see `StepRecord` for the tokens.

    Attributes:
        decision: The decision of `DraftBudget` before the step.
        verified: Number of draft tokens, including forced tokens.
        charged: Number of draft tokens that count as a cost of drafting. Forced tokens of accepted
            drafts do not count: without the draft, a later forward would have cached them.
        decided: Emitted tokens that were not forced, each worth one plain forward of its row.
        reads: See `Plan.reads`.
    """

    rows: int
    tokens: int  # of the step, without draft tokens
    context: float
    verified: int
    charged: int
    decided: int
    draft_seconds: float
    verify_seconds: float
    reads: bool = False
    decision: Decision = Decision()

    @classmethod
    def of(cls, plan: Plan, record: StepRecord, decision: Decision) -> Self:
        """Reads the costs and tokens of a step from its plan and its record."""
        verified = int(record.drafted.sum()) + record.carried_tokens
        return cls(
            rows=len(plan.emitting),
            tokens=len(plan.tokens),
            context=plan.context,
            verified=verified,
            charged=verified - record.carried_kept,
            decided=int(record.accepted.sum()) + record.bonus_tokens,
            draft_seconds=record.draft_seconds,
            verify_seconds=record.verify_seconds,
            reads=plan.reads,
            decision=decision,
        )

    @property
    def saved(self) -> int:
        """Number of forwards that drafts saved; a token that ends an answer saves none."""
        return self.decided - self.rows


class DraftBudget:
    """Decides before each step which draft tokens are worth verifying, and learns from its result.

    A step may be decided before the result of the step before is known. The budget sets the minimum
    probability of draft tokens (`min_probs`). `Plan.budget` sets the maximum number of draft tokens
    of each row.

    Args:
        costs: Costs of steps. None if they are unknown; then every draft token is worth verifying.
        max_tokens: Maximum number of draft tokens of a step, summed over rows.

    Attributes:
        decision: The decision of the last call of `min_probs`.
    """

    def __init__(self, costs: LiveCosts | None, max_tokens: int) -> None:
        self._costs = costs
        self._unprobed, self._probe_after = 0, PROBE
        self.decision = Decision()
        convex_steps(np.zeros(2))  # compiles before the first request
        self.begin_again(max_tokens)

    def begin_again(self, max_tokens: int) -> None:
        """Forget past results, because another proposer makes the drafts from now on."""
        self._max_tokens = max_tokens
        self._rate = 0.0
        self._gain = 0.0
        self._tried = 0
        self._pause = self._paused = 0
        self._resumes = True
        self._marginals: dict[tuple[int, int, int], tuple[float, Float32]] = {}
        self._table = self._costs.table if self._costs else None  # of `_marginals`

    @property
    def learns(self) -> bool:
        """Whether `time` and `learn` have an effect."""
        return self._costs is not None

    @property
    def cost_error(self) -> float:
        """How much the times of real steps differ from their costs; see `LiveCosts`."""
        return self._costs.error if self._costs else 0.0

    def min_probs(
        self, rows: int, tokens: int, context: float, reads: bool = False
    ) -> Float32 | None:
        """Returns the minimum probability at which each further draft token of the step pays.

        Args:
            rows: Number of rows that emit tokens.
            tokens: Number of tokens of the step without drafts.
            context: Mean length of the rows.
            reads: See `Plan.reads`; a step that reads a prompt is never a probe.

        Returns:
            ``float32[n]``; n may be 0. None if every token is worth verifying.
        """
        if self._costs is None:
            return None
        probes = self._unprobed >= self._probe_after and rows > 0 and not reads
        self.decision = Decision(probes, self._paused > 0 and not probes)
        if self.decision.paused and rows:
            self._paused -= 1
        if probes:
            self._unprobed = 0
        if self.decision.paused or rows == 0:
            return np.zeros(0, np.float32)
        plain, marginals = self._price(self._costs.table, rows, tokens, context, reads)
        rate = self._rate or rows / plain
        min_probs = marginals * np.float32(rate)
        return np.minimum(min_probs, np.float32(LIKELY)) if probes else min_probs

    def time(self, spent: Spent, late: bool = False) -> None:
        """Correct the costs by a step's time. Steps that read prompts are skipped.

        Args:
            late: See `StepClock`; then the time only lowers costs that exceed it.
        """
        if self._costs is None or spent.rows == 0 or spent.reads:
            return
        tokens = spent.tokens + spent.verified
        shape = spent.rows, tokens, spent.context
        if late and spent.verify_seconds >= self._costs.expected(*shape):
            return
        error = self._costs.correct(spent.rows, tokens, spent.context, spent.verify_seconds)
        if spent.decision.probes and spent.verified:  # accurate costs need fewer probes
            after = 2 * self._probe_after if abs(error) < WRONG / 2 else self._probe_after // 2
            self._probe_after = min(max(after, PROBE), LONGEST_PROBE)

    def learn(self, spent: Spent) -> None:
        """Update rate, gain and pause after a step for which drafts were requested."""
        if self._costs is None or spent.rows == 0:
            return
        if spent.decision.probes:
            return  # a probe drafts regardless of cost, so its rate is not typical
        self._unprobed += 1
        if self._resumes and not spent.decision.paused:
            self._resumes = False
            return  # the draft time includes the start of rows that came in the pause
        plain, marginals = self._price(
            self._costs.table, spent.rows, spent.tokens, spent.context, spent.reads
        )
        extra = float(marginals[: spent.charged].sum()) + spent.draft_seconds
        rate = spent.decided / (plain + extra)
        self._rate = FADE * self._rate + (1 - FADE) * rate if self._rate else rate
        if spent.decision.paused:
            self._resumes = True
            return
        self._gain = FADE * self._gain + (spent.saved - self._rate * extra)
        self._tried += 1
        if self._tried >= TRIAL and self._gain < 0:
            self._pause = min(max(2 * self._pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            self._paused, self._tried, self._gain = self._pause, TRIAL // 2, 0.0
        elif self._tried >= 2 * TRIAL:
            self._pause = 0

    def _price(
        self, costs: StepCosts, rows: int, tokens: int, context: float, reads: bool
    ) -> tuple[float, Float32]:
        """Returns the seconds of a plain step, and of each draft token of this step.

        Prompts must be read whether or not the step drafts, so the plain step reads no prompts.
        """
        plain, marginals = self._curve(costs, rows, tokens, context)
        if reads:
            plain, _ = self._curve(costs, rows, rows, context)
        return plain, marginals

    def _curve(
        self, costs: StepCosts, rows: int, tokens: int, context: float
    ) -> tuple[float, Float32]:
        """Returns seconds of the step without drafts, and of each draft token, never falling."""
        if costs is not self._table:
            self._table = costs
            self._marginals.clear()
        if tokens > 4 * rows:
            tokens = tokens // _TOKENS_GRAIN * _TOKENS_GRAIN
        key = (rows, tokens, int(context) // _CONTEXT_GRAIN)
        if key not in self._marginals:
            context = (key[2] + 0.5) * _CONTEXT_GRAIN
            grown = np.arange(tokens, tokens + self._max_tokens + 1, dtype=np.float64)
            seconds = costs.seconds(rows, grown, context)
            if len(self._marginals) >= _MAX_CURVES:
                self._marginals.clear()
            self._marginals[key] = float(seconds[0]), convex_steps(seconds)
        return self._marginals[key]


def convex_steps(values: NDArray[np.float64]) -> Float32:
    """Returns ``float32[n]`` slopes of the lower convex hull of ``n + 1`` values, at least 0.

    If a cost jumps and then stays flat, each token of the flat part bears a share of the jump.
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
