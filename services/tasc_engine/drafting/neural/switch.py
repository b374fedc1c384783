"""Switches a neural drafter off permanently if it keeps failing or takes too long."""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, Proposer
from tasc_draft.labels import LabelTrie
from tasc_engine.drafting.safe_proposer import checked, max_draft_tokens
from tasc_engine.layout import Int32
from tasc_engine.model.hidden_states import HiddenStateRequest

Reason: TypeAlias = Literal["failed", "slow"]

FAILURES = 3  # consecutive ones after which the drafter is switched off
STEPS = 16  # their median time is compared with the limit, as the first ones compile

log = logging.getLogger(__name__)


class DrafterSwitch:
    """A drafter until it is switched off, then none; see `tasc_draft.Proposer`.

    A failure costs the drafts of a row or of a step, not those of n-grams beside the drafter. The
    drafter's memory is freed when it is switched off. A row in use may be started again.

    Args:
        limit_s: Maximum median of the seconds of a drafted step.
        on_off: Called with the reason, once.
        on_drafted: Called after a step with the rows that have drafts.
        clock: Returns seconds since an arbitrary time.

    Attributes:
        off: The reason why it is switched off; None if it is on.
    """

    def __init__(
        self,
        drafter: Proposer,
        vocab_size: int,
        limit_s: float,
        on_off: Callable[[Reason], None],
        on_drafted: Callable[[Int32], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.off: Reason | None = None
        self.max_depth, self.max_tokens = drafter.max_depth, max_draft_tokens(drafter)
        self._drafter: Proposer | None = drafter
        self._vocab_size, self._limit_s, self._clock = vocab_size, limit_s, clock
        self._on_off, self._on_drafted = on_off, on_drafted
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._failures = 0
        self._in_use: set[int] = set()
        self._lost: set[int] = set()

    @property
    def hidden_state_request(self) -> HiddenStateRequest:
        """The hidden states that the drafter needs now; none after it is switched off."""
        return HiddenStateRequest.of(self._drafter)

    def start(self, row: int, prompt: Int32, labels: LabelTrie | None = None) -> None:
        self.finish(row)
        self._in_use.add(row)
        self._lost.discard(row)
        self._call(row, "start", row, prompt, labels)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        if row in self._in_use and row not in self._lost:
            self._call(row, "observe", row, tokens, hidden)

    def finish(self, row: int) -> None:
        if row in self._in_use:
            self._in_use.discard(row)
            self._call(row, "finish", row)

    def propose(
        self, rows: Int32, budget: Int32, min_probs: NDArray[np.float32] | None = None
    ) -> Drafts:
        none = Drafts.empty(len(rows))
        if self._lost:
            budget = np.where(np.isin(rows, list(self._lost)), 0, budget).astype(np.int32)
        if self._drafter is None or not budget.any():
            return none
        began = self._clock()
        try:
            found = self._drafter.propose(rows, budget, min_probs)
            drafts = checked(found, budget, self._vocab_size, self.max_depth)
            seconds = self._clock() - began
            self._on_drafted(rows[drafts.sizes > 0])
        except Exception as error:
            self._fail("the drafter failed; this step goes without its drafts", error)
            return none
        self._failures = 0
        self._check_time(seconds)
        return drafts

    def _call(self, row: int, name: str, *args: Any) -> None:
        if self._drafter is None:
            return
        try:
            getattr(self._drafter, name)(*args)
        except Exception as error:
            self._lost.add(row)
            self._fail(f"the drafter failed; row {row} goes without its drafts", error)

    def _fail(self, message: str, error: Exception) -> None:
        self._failures += 1
        if self._failures < FAILURES:
            log.warning(message, exc_info=error)
        else:
            self._switch_off("failed", f"it failed {FAILURES} times in a row, at last by {error!r}")

    def _check_time(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if len(self._seconds) < STEPS:
            return
        if (median := statistics.median(self._seconds)) > self._limit_s:
            why = f"a step's drafts took {median:.3g} s, the limit is {self._limit_s:g} s"
            self._switch_off("slow", why)

    def _switch_off(self, reason: Reason, why: str) -> None:
        self._drafter, self.off = None, reason
        log.warning(
            "drafting by a model is off until a restart, requests go on: %s; `tasc task set` makes "
            "its trees (--draft-depth, --draft-nodes) or its vocabulary (--draft-vocabulary) "
            "smaller, or takes it away (--unset drafter); engine.neural_draft_limit_s is the limit",
            why,
        )
        self._on_off(reason)
