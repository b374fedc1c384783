"""Switches a neural proposer off for good where it keeps failing or takes too long.

Drafts decide nothing about answers, so requests go on: without drafts of its own, or with those of
the n-grams beside it. It looks at time and failures, never at whether drafts are accepted.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, Proposer
from tasc_engine.drafting.safe_proposer import is_forest, most_tokens
from tasc_engine.layout import Int32
from tasc_engine.model.hidden_states import HiddenStateRequest

log = logging.getLogger(__name__)

Reason: TypeAlias = Literal["failed", "slow"]
FAILURES = 3  # in a row
STEPS = 16  # whose median is compared with the limit: the first ones compile


class GuardedProposer:
    """A neural proposer that is off for good once it does harm; see `tasc_draft.Proposer`.

    A row in use may be started again, which `tasc_draft.Proposer` does not allow.

    Args:
        limit_s: Longest seconds of a drafted step, as a median.
        clock: Seconds from anywhere.

    Attributes:
        on_drafted: Told, after a step, which rows have drafts.
        on_off: Told why, once.
        off: Why it is off; None while it is not.
    """

    def __init__(
        self, neural: Proposer, vocab_size: int, limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._max_depth, self._max_tokens = neural.max_depth, most_tokens(neural)
        self.on_drafted: Callable[[Int32], None] = lambda rows: None
        self.on_off: Callable[[Reason], None] = lambda reason: None
        self.off: Reason | None = None
        self._neural: Proposer | None = neural
        self._vocab_size, self._limit_s, self._clock = vocab_size, limit_s, clock
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._failures = self._told = 0
        self._in_use: set[int] = set()
        self._lost: set[int] = set()

    @property
    def wants(self) -> HiddenStateRequest:
        """Nothing once it is off: the target's forwards are plain ones again."""
        return HiddenStateRequest.of(self._neural)

    @property
    def max_depth(self) -> int:
        return self._max_depth

    @property
    def max_tokens(self) -> int:
        """Of a row's tree."""
        return self._max_tokens

    def start(self, row: int, prompt: Int32) -> None:
        if row in self._in_use:
            self.finish(row)
        self._lost.discard(row)
        self._in_use.add(row)
        self._call(row, "start", row, prompt)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        if row not in self._lost:
            self._call(row, "observe", row, tokens, hidden)

    def finish(self, row: int) -> None:
        self._in_use.discard(row)
        self._call(row, "finish", row)

    def propose(
        self, rows: Int32, budget: Int32, least: NDArray[np.float32] | None = None
    ) -> Drafts:
        none = Drafts.empty(len(rows))
        if self._neural is None:
            return none
        if self._lost:
            budget = np.where(np.isin(rows, list(self._lost)), 0, budget).astype(np.int32)
        if not budget.any():
            return none
        began = self._clock()
        try:
            drafts = self._neural.propose(rows, budget, least)
            if not is_forest(drafts, budget, self._vocab_size, self._max_depth):
                raise ValueError("the drafts are no trees within their limits")
        except Exception as error:
            self._fail(error)
            return none
        self._failures = 0
        self._look_at(self._clock() - began)
        self._tell(rows[np.diff(drafts.offsets) > 0])
        return drafts

    def _tell(self, rows: Int32) -> None:
        try:
            self.on_drafted(rows)
        except Exception as error:  # of who listens: no fault of the drafter's
            log.warning("drafted rows are not counted any more", exc_info=error)
            self.on_drafted = lambda rows: None

    def _call(self, row: int, method: str, *args: Any) -> None:
        try:
            if self._neural is not None:
                getattr(self._neural, method)(*args)
        except Exception as error:
            self._lost.add(row)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures, self._told = self._failures + 1, self._told + 1
        if self._failures >= FAILURES:
            self._switch_off("failed", f"it failed {FAILURES} times in a row, at last by {error!r}")
        elif self._told & (self._told - 1) == 0:  # 1, 2, 4, ... so that logs stay readable
            log.warning("the drafter failed (%d failures so far)", self._told, exc_info=error)

    def _look_at(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if len(self._seconds) < STEPS:
            return
        if (took := statistics.median(self._seconds)) > self._limit_s:
            self._switch_off(
                "slow", f"a step's drafts took {took:.3g} s, the limit is {self._limit_s:g} s"
            )

    def _switch_off(self, reason: Reason, why: str) -> None:
        self._neural, self.off = None, reason
        self.on_drafted = lambda rows: None
        log.warning(
            "drafting by a model is off until a restart, requests go on: %s; `tasc task set` makes "
            "its trees (--draft-depth, --draft-nodes) or its vocabulary (--draft-vocabulary) "
            "smaller, or takes it away (--unset drafter); engine.neural_draft_limit_s is the limit",
            why,
        )  # fmt: skip
        self.on_off(reason)
