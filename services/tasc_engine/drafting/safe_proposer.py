"""Asks a proposer for drafts and goes without where it fails: no draft is worth a request.

A proposer that raises, or whose draft is no tree, is counted and left alone for the row or the
step. Drafts decide nothing about answers, so nothing else changes.
"""

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import SOURCES, Drafts, Proposer
from tasc_engine.drafting.hidden_state_buffer import HiddenStateBuffer
from tasc_engine.model.hidden_states import HiddenStateRequest, HiddenStates
from tasc_engine.step.accept import Accepted
from tasc_engine.step.plan import Plan

Int32 = NDArray[np.int32]
log = logging.getLogger(__name__)


def most_tokens(proposer: Proposer) -> int:
    """Most draft tokens of a row: those that say no number make as many as they are deep."""
    return int(getattr(proposer, "max_tokens", proposer.max_depth))


class Drafter:
    """A proposer that cannot hurt.

    Attributes:
        failures: Calls that raised and drafts that were no trees, since the engine started.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.failures = self._told = 0
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._lost: set[int] = set()
        self._watch = HiddenStateBuffer()
        is_forest(Drafts.empty(1), np.ones(1, np.int32), vocab_size, 1)  # compiled before it counts

    @property
    def max_depth(self) -> int:
        return self._proposer.max_depth

    @property
    def wants(self) -> HiddenStateRequest:
        """What the proposer wants of the target's forwards, at this moment."""
        return HiddenStateRequest.of(self._proposer)

    def use(self, proposer: Proposer) -> None:
        """Ask another proposer from now on; it knows no row until that is started again."""
        self._proposer = proposer
        self._watch.forget()
        self._lost.clear()

    def start(self, row: int, prompt: Int32, said: Int32) -> None:
        """Begin a row with ``int32[*]`` ids of its prompt, and of its answer so far."""
        self._lost.discard(row)
        self._call(row, self._proposer.start, row, prompt)
        if len(said):
            self.observe(row, said)

    def see(self, plan: Plan, drafts: Drafts, accepted: Accepted, thoughts: HiddenStates) -> None:
        """What the target thought in a step, for a proposer that wants to know; it hears of it when
        its row is observed.
        """
        if not self.wants:
            return
        try:
            self._watch.see(plan, drafts, accepted, thoughts)
        except Exception:
            self._watch.forget()
            self._fail("what the target thought was not kept; drafts go without it", raised=True)

    def observe(self, row: int, tokens: Int32) -> None:
        if row in self._lost:
            self._watch.drop(row)
        else:
            self._call(row, self._observe, row, tokens)

    def finish(self, row: int) -> None:
        self._watch.drop(row)
        self._call(row, self._proposer.finish, row)

    def failures_since(self) -> int:
        """Failures since this was last asked."""
        told, self._told = self._told, self.failures
        return self.failures - told

    def propose(
        self, rows: Int32, budget: Int32, least: NDArray[np.float32] | None = None
    ) -> Drafts:
        """Drafts for rows, see `Proposer`; empty where there are none to be had."""
        if self._lost:
            budget = np.where(np.isin(rows, list(self._lost)), 0, budget).astype(np.int32)
        if not budget.any() or (least is not None and not len(least)):
            return Drafts.empty(len(rows))
        try:
            drafts = self._proposer.propose(rows, budget, least)
        except Exception:
            self._fail("the proposer failed; this step goes without drafts", raised=True)
            return Drafts.empty(len(rows))
        if is_forest(drafts, budget, self._vocab_size, self.max_depth):
            return drafts
        self._fail("the proposer's drafts are no trees within their limits; they are dropped")
        return Drafts.empty(len(rows))

    def _observe(self, row: int, tokens: Int32) -> None:
        self._proposer.observe(row, tokens, self._watch.take(row))

    def _call(self, row: int, method: Callable[..., None], *args: Any) -> None:
        try:
            method(*args)
        except Exception:
            self._lost.add(row)
            self._fail(f"the proposer failed; row {row} goes without drafts", raised=True)

    def _fail(self, message: str, raised: bool = False) -> None:
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:  # 1, 2, 4, ... so that logs stay readable
            log.warning("%s (%d failures so far)", message, self.failures, exc_info=raised)


def is_forest(drafts: Drafts, budget: Int32, vocab_size: int, max_depth: int) -> bool:
    """Whether each draft is a tree, parents in front, of ids, within its row's budget."""
    sizes = {len(drafts.tokens), len(drafts.parents), len(drafts.depths), len(drafts.source)}
    offsets = drafts.offsets
    if len(sizes) > 1 or len(offsets) != len(budget) + 1 or offsets[-1] != len(drafts.tokens):
        return False
    found = _is_forest(
        drafts.tokens,
        drafts.parents,
        drafts.depths,
        drafts.source,
        offsets,
        budget,
        vocab_size,
        max_depth,
        len(SOURCES),
    )  # fmt: skip
    return bool(found)


@numba.njit(cache=True, nogil=True)
def _is_forest(
    tokens: Any, parents: Any, depths: Any, source: Any, offsets: Any, budget: Any,
    vocab_size: int, max_depth: int, sources: int,
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
