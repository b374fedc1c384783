"""Whether the drafts of a step are worth their cost, asked before it and told after it.

Where nobody knows what steps cost, all are. It makes no drafts; how it decides is `Spender`'s.
"""

import numpy as np
from numpy.typing import NDArray

from tasc_engine.config import EngineConfig
from tasc_engine.cost import StepCosts
from tasc_engine.plan import Plan
from tasc_engine.spending import Spender, Spent
from tasc_engine.stats import StepRecord


class Worth:
    """What one engine knows of that.

    Args:
        costs: None where they are not known.
        most: Draft tokens of a row that there may be.
    """

    def __init__(self, costs: StepCosts | None, config: EngineConfig, most: int) -> None:
        self._costs, self._config = costs, config
        self._asked = False
        self.begin_again(most)

    def begin_again(self, most: int) -> None:
        """Forget what drafts have brought: others are made from now on, none of them larger."""
        of_all = self._config.rows * min(self._config.max_draft_tokens, most)
        self._spender = Spender(self._costs, of_all) if self._costs else None

    @property
    def paused(self) -> bool:
        """Whether the step goes without drafts because the last ones did not pay."""
        return self._asked and self._spender is not None and self._spender.paused

    def least(self, plan: Plan, budget: NDArray[np.int32]) -> NDArray[np.float32] | None:
        """Least probability of each draft token of the step; None where any will do."""
        self._asked = bool(budget.any())
        if not self._asked or self._spender is None:
            return None
        return self._spender.least(len(plan.emitting), len(plan.tokens), plan.context)

    def learn(self, plan: Plan, record: StepRecord) -> None:
        """What the step says of drafting, if it was asked for any."""
        if self._asked and self._spender is not None:
            self._spender.learn(
                Spent(
                    rows=len(plan.emitting),
                    tokens=len(plan.tokens),
                    context=plan.context,
                    drafted=int(record.drafted.sum()),
                    accepted=int(record.accepted.sum()),
                    emitted=record.emitted_tokens,
                    draft_seconds=record.draft_seconds,
                )
            )
