"""Makes any proposer safe to call: its failures and bad drafts never fail a request.

Answers do not depend on drafts. If the proposer fails for a row, the row has no drafts until it is
started again. If the drafts of a step are not trees, the step uses no drafts. A proposer with a
limit is switched off permanently if it keeps failing or takes too long.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import SOURCES, Drafts, Proposer
from tasc_draft.labels import LabelTrie
from tasc_engine.drafting.hidden_state_buffer import HiddenStateBuffer
from tasc_engine.layout import Int32
from tasc_engine.model.hidden_states import HiddenStateRequest, HiddenStates
from tasc_engine.sampling.accept import Accepted
from tasc_engine.step.plan import Plan

Reason: TypeAlias = Literal["failed", "slow"]

FAILURES = 3  # consecutive failures after which a proposer with a limit is switched off
STEPS = 16  # steps whose median time is compared with the limit, since the first steps compile
NOTHING = np.zeros(0, np.int32)

log = logging.getLogger(__name__)


def max_draft_tokens(proposer: Proposer) -> int:
    """Maximum draft tokens of a row: the proposer's ``max_tokens``, or its ``max_depth``."""
    return int(getattr(proposer, "max_tokens", proposer.max_depth))


@dataclass(frozen=True)
class DraftLimit:
    """The limit of a proposer that may be switched off.

    Attributes:
        seconds: Maximum median of the seconds of a drafted step.
        on_off: Called once, with the reason, when the proposer is switched off.
    """

    seconds: float
    on_off: Callable[[Reason], None]


class SafeProposer:
    """A proposer that cannot fail; see `tasc_draft.Proposer`.

    A row in use may be started again, which `tasc_draft.Proposer` does not allow. A row that was
    not started must have a budget of 0. A proposer may have a `DraftLimit` as ``limit``.

    Args:
        request_hidden_states: Called when the proposer needs other hidden states than before from
            the next forward on.
        clock: Returns seconds since an arbitrary time.

    Attributes:
        failures: Number of calls that raised, plus number of drafts that were not trees.
    """

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        request_hidden_states: Callable[[HiddenStateRequest], None] = lambda request: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.failures = self._reported = 0
        self._vocab_size, self._request_hidden_states = vocab_size, request_hidden_states
        self._clock = clock
        self._requested: HiddenStateRequest | None = None
        self._hidden_states = HiddenStateBuffer()
        self._in_use: set[int] = set()
        self._lost: set[int] = set()
        self.use(proposer)
        is_forest(Drafts.empty(1), np.ones(1, np.int32), vocab_size, 1)  # compiles before timing

    def use(self, proposer: Proposer) -> None:
        """Replaces the proposer; each row has no drafts until it is started again."""
        for row in tuple(self._in_use):  # parts of the new proposer may have the same rows
            self.finish(row)
        self._proposer: Proposer | None = proposer
        self.max_depth, self.max_tokens = proposer.max_depth, max_draft_tokens(proposer)
        self._limit: DraftLimit | None = getattr(proposer, "limit", None)
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._in_a_row = 0
        self._request()
        self._hidden_states.forget()
        self._lost.clear()

    def start(
        self,
        row: int,
        prompt: Int32,
        labels: LabelTrie | None = None,
        committed: Int32 = NOTHING,
    ) -> None:
        """Starts a row with its prompt and its answer so far, ``int32[*]`` ids."""
        if row in self._in_use:
            self.finish(row)
        self._in_use.add(row)
        self._lost.discard(row)
        self._call(row, lambda proposer: proposer.start(row, prompt, labels))
        if len(committed):
            self.observe(row, committed)

    def prepare(
        self, upcoming: Sequence[tuple[Int32, LabelTrie | None]], may_go_on: Callable[[], bool]
    ) -> None:
        """Lets the proposer do work ahead; see `NgramProposer.prepare`."""
        prepare: Callable[[Any, Any], None] | None = getattr(self._proposer, "prepare", None)
        if prepare is not None:
            try:
                prepare(upcoming, may_go_on)
            except Exception as error:
                self._fail("a proposer failed before its rows began", error)

    def keep(
        self, plan: Plan, drafts: Drafts, accepted: Accepted, hidden_states: HiddenStates
    ) -> None:
        """Keeps the target's hidden states of a step until their rows are observed."""
        if not HiddenStateRequest.of(self._proposer):
            return
        try:
            self._hidden_states.keep(plan, drafts, accepted, hidden_states)
            for sequence in plan.sequences:
                if sequence.scorer is not None:  # it makes its trees without the proposer
                    self._hidden_states.drop(sequence.row)
        except Exception as error:
            self._hidden_states.forget()
            self._fail("hidden states were not kept; drafts go without them", error)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        def observe(proposer: Proposer) -> None:
            kept = self._hidden_states.take(row)
            proposer.observe(row, tokens, kept if hidden is None else hidden)

        if row in self._lost or row not in self._in_use:
            self._hidden_states.drop(row)
        else:
            self._call(row, observe)

    def observe_rows(self, rows: Int32, new: Sequence[list[int]]) -> None:
        """Calls `observe` for several rows, or passes all tokens on at once if possible."""
        at_once: Callable[..., None] | None = getattr(self._proposer, "observe_rows", None)
        if at_once is None or self._lost:
            for row, tokens in zip(rows.tolist(), new, strict=True):
                if tokens:
                    self.observe(row, np.array(tokens, np.int32))
            return
        offsets = np.zeros(len(new) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in new], out=offsets[1:])
        try:
            at_once(rows, np.array([*chain.from_iterable(new)], np.int32), offsets)
        except Exception as error:
            self._lost.update(self._in_use.intersection(rows.tolist()))
            self._fail("a proposer failed; the rows of a step go without its drafts", error)

    def finish(self, row: int) -> None:
        self._hidden_states.drop(row)
        if row not in self._in_use:
            return
        self._in_use.discard(row)
        self._call(row, lambda proposer: proposer.finish(row))

    def propose(
        self, rows: Int32, budget: Int32, min_probs: NDArray[np.float32] | None = None
    ) -> Drafts:
        """Returns drafts for rows, see `Proposer`; empty drafts if the proposer fails or is off."""
        if self._lost:
            budget = np.where(np.isin(rows, list(self._lost)), 0, budget).astype(np.int32)
        nothing_pays = min_probs is not None and not len(min_probs)
        if self._proposer is None or not budget.any() or nothing_pays:
            return Drafts.empty(len(rows))
        began = self._clock()
        try:
            drafts = self._proposer.propose(rows, budget, min_probs)
            if not is_forest(drafts, budget, self._vocab_size, self.max_depth):
                raise ValueError("the drafts are not trees within their limits")
        except Exception as error:
            self._fail("a proposer failed; this step goes without its drafts", error)
            return Drafts.empty(len(rows))
        self._in_a_row = 0
        self._check_time(self._clock() - began)
        self._request()  # a part of the proposer may have been switched off
        return drafts

    def new_failures(self) -> int:
        """Returns the number of failures since the last call, including those of a guarded part."""
        reported, self._reported = self._reported, self.failures
        of_part: Callable[[], int] = getattr(self._proposer, "new_failures", lambda: 0)
        return self.failures - reported + of_part()

    @property
    def hidden_state_request(self) -> HiddenStateRequest:
        """The hidden states that the proposer needs now; none after it is switched off."""
        return HiddenStateRequest.of(self._proposer)

    def _request(self) -> None:
        if (request := self.hidden_state_request) != self._requested:
            self._requested = request
            self._request_hidden_states(request)

    def _call(self, row: int, action: Callable[[Proposer], None]) -> None:
        try:
            if self._proposer is not None:
                action(self._proposer)
        except Exception as error:
            self._lost.add(row)
            self._fail(f"a proposer failed; row {row} goes without its drafts", error)

    def _fail(self, message: str, error: Exception) -> None:
        self.failures, self._in_a_row = self.failures + 1, self._in_a_row + 1
        if self._limit and self._in_a_row >= FAILURES:
            why = f"it failed {FAILURES} times in a row, at last by {error!r}"
            self._switch_off(self._limit, "failed", why)
        elif self.failures & (self.failures - 1) == 0:  # 1, 2, 4, ... so that logs stay readable
            log.warning("%s (%d failures so far)", message, self.failures, exc_info=error)

    def _check_time(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if self._limit is None or len(self._seconds) < STEPS:
            return
        if (median := statistics.median(self._seconds)) > self._limit.seconds:
            why = f"a step's drafts took {median:.3g} s, the limit is {self._limit.seconds:g} s"
            self._switch_off(self._limit, "slow", why)

    def _switch_off(self, limit: DraftLimit, reason: Reason, why: str) -> None:
        self._proposer, self._limit = None, None
        self._request()
        log.warning(
            "drafting by a model is off until a restart, requests go on: %s; `tasc task set` makes "
            "its trees (--draft-depth, --draft-nodes) or its vocabulary (--draft-vocabulary) "
            "smaller, or takes it away (--unset drafter); engine.neural_draft_limit_s is the limit",
            why,
        )
        try:
            limit.on_off(reason)
        except Exception as error:  # not the proposer's fault
            log.warning("that drafting is off was not reported", exc_info=error)


def is_forest(drafts: Drafts, budget: Int32, vocab_size: int, max_depth: int) -> bool:
    """Whether each draft is a tree of valid ids, parents first, within its row's budget."""
    parts = drafts.tokens, drafts.parents, drafts.depths, drafts.source
    offsets = drafts.offsets
    if len(offsets) != len(budget) + 1 or {len(part) for part in parts} != {offsets[-1]}:
        return False
    return bool(_is_forest(*parts, offsets, budget, vocab_size, max_depth, len(SOURCES)))


@numba.njit(cache=True, nogil=True)
def _is_forest(
    tokens: Any, parents: Any, depths: Any, source: Any, offsets: Any, budget: Any, vocab_size: int,
    max_depth: int, sources: int,
) -> bool:  # fmt: skip
    if offsets[0] != 0:
        return False
    for i in range(len(budget)):
        begin, size = offsets[i], offsets[i + 1] - offsets[i]
        if size < 0 or size > budget[i]:
            return False
        for x in range(size):
            parent = parents[begin + x]
            if parent < -1 or parent >= x or not 0 <= tokens[begin + x] < vocab_size:
                return False
            above = depths[begin + parent] if parent >= 0 else 0
            if depths[begin + x] != above + 1 or depths[begin + x] > max_depth:
                return False
            if not 0 <= source[begin + x] < sources:
                return False
    return True
