"""N-gram mixture and neural drafter in one tree: the n-grams draft where they are sure, and where
they are not the drafter is asked too.

What the drafter says is a guest in the n-grams' tree (`tasc_draft.mixture.guests`), so each goes
on behind tokens of the other, and how much each counts is learnt. It runs no model itself.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, Proposer
from tasc_engine.drafting import most_tokens
from tasc_engine.layout import Int32
from tasc_engine.neural.arms import Always, Arms
from tasc_engine.neural.wants import Wants


class Host(Proposer, Protocol):
    """A proposer that takes another's trees into its own, as `tasc_draft.NgramProposer` does."""

    def propose(
        self,
        rows: Int32,
        budget: Int32,
        least: NDArray[np.float32] | None = None,
        guest: Drafts | None = None,
    ) -> Drafts: ...


class HybridProposer:
    """Two proposers as one; see `tasc_draft.Proposer`.

    Args:
        ngram: Costs next to nothing, and is always asked; in a step that may ask the model, twice.
        neural: Is asked for rows where the likeliest token of the n-grams has less probability
            than ``sure``, in steps that ``arms`` says.
        arms: None: those in which it brings more tokens a second than not to ask it.

    Raises:
        ValueError: ``sure`` is no probability.
    """

    def __init__(
        self,
        ngram: Host,
        neural: Proposer,
        sure: float = 0.9,
        arms: Arms | Always | None = None,
    ) -> None:
        if not 0.0 <= sure <= 1.0:
            raise ValueError(f"sure is {sure}; it must lie between 0 and 1")
        self._ngram, self._neural, self._sure = ngram, neural, sure
        self._arms, self._in_use = arms or Arms(), set[int]()

    @property
    def wants(self) -> Wants:
        """What the drafter wants now."""
        return Wants.of(self._neural)

    @property
    def max_depth(self) -> int:
        return self._ngram.max_depth

    @property
    def max_tokens(self) -> int:
        """Of a row's tree: the larger of the two, which may hold tokens of both."""
        return max(most_tokens(self._ngram), most_tokens(self._neural))

    def start(self, row: int, prompt: Int32) -> None:
        self._in_use.add(row)
        self._ngram.start(row, prompt)
        self._neural.start(row, prompt)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        self._arms.emitted(len(tokens))
        self._ngram.observe(row, tokens)
        self._neural.observe(row, tokens, hidden)

    def finish(self, row: int) -> None:
        self._in_use.discard(row)
        if not self._in_use:
            self._arms.idle()
        self._ngram.finish(row)
        self._neural.finish(row)

    def propose(
        self, rows: Int32, budget: Int32, least: NDArray[np.float32] | None = None
    ) -> Drafts:
        if not self._arms.begin():
            return self._ngram.propose(rows, budget, least)
        asked = np.where(self._best(rows, budget) < self._sure, budget, 0).astype(np.int32)
        guest = self._neural.propose(rows, asked) if asked.any() else None
        return self._ngram.propose(rows, budget, least, guest)

    def _best(self, rows: Int32, budget: Int32) -> NDArray[np.float32]:
        """Probability of the n-grams' likeliest first token of each row; 0 where there is none."""
        first = self._ngram.propose(rows, np.minimum(budget, 1))
        best = np.zeros(len(rows), np.float32)
        said = np.diff(first.offsets) > 0
        best[said] = np.exp(first.logp[first.offsets[:-1][said]])
        return best
