"""N-gram mixture and neural drafter in one tree: the n-grams draft where they are sure, and where
they are not the drafter is asked too.

How much each counts is learnt by how sure the n-grams are, from how probable each of the two found
what the target said. It runs no model itself.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, Proposer
from tasc_engine.layout import Int32
from tasc_engine.neural.arms import Always, Arms
from tasc_engine.neural.merging import merge
from tasc_engine.neural.wants import Wants

_LEVELS = 8  # of how sure the n-grams are
_FORGET = 0.995  # of what was learnt, an answer's token
_LEAST = 1e-3  # probability of a token that a draft does not have


class HybridProposer:
    """Two proposers as one; see `tasc_draft.Proposer`.

    Args:
        ngram: Costs next to nothing, and is always asked.
        neural: Is asked for rows where the likeliest token of the n-grams has less probability
            than ``sure``, in steps that ``arms`` says.
        arms: None: those in which it brings more tokens a second than not to ask it.

    Raises:
        ValueError: ``sure`` is no probability.
    """

    def __init__(
        self,
        ngram: Proposer,
        neural: Proposer,
        sure: float = 0.9,
        arms: Arms | Always | None = None,
    ) -> None:
        if not 0.0 <= sure <= 1.0:
            raise ValueError(f"sure is {sure}; it must lie between 0 and 1")
        self._ngram, self._neural, self._sure = ngram, neural, sure
        # Evidence for each of the two, in nats, by level.
        self._evidence = np.zeros((_LEVELS, 2))
        self._arms, self._in_use = arms or Arms(), set[int]()
        self._said: dict[int, tuple[int, dict[int, float], dict[int, float]]] = {}

    @property
    def wants(self) -> Wants:
        """What the drafter wants now."""
        return Wants.of(self._neural)

    @property
    def max_depth(self) -> int:
        return max(self._ngram.max_depth, self._neural.max_depth)

    @property
    def weights(self) -> NDArray[np.float32]:
        """``float32[levels]``: how much n-grams count, from unsure to sure."""
        gap = np.clip(self._evidence[:, 1] - self._evidence[:, 0], -30.0, 30.0)
        return (1 / (1 + np.exp(gap))).astype(np.float32)

    def start(self, row: int, prompt: Int32) -> None:
        self._in_use.add(row)
        self._ngram.start(row, prompt)
        self._neural.start(row, prompt)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        self._arms.emitted(len(tokens))
        self._learn(row, tokens)
        self._ngram.observe(row, tokens)
        self._neural.observe(row, tokens, hidden)

    def finish(self, row: int) -> None:
        self._in_use.discard(row)
        if not self._in_use:
            self._arms.idle()
        self._said.pop(row, None)
        self._ngram.finish(row)
        self._neural.finish(row)

    def propose(
        self, rows: Int32, budget: Int32, least: NDArray[np.float32] | None = None
    ) -> Drafts:
        one = self._ngram.propose(rows, budget, least)
        roots = [_roots(one, i) for i in range(len(rows))]
        best = np.array([max(r.values(), default=0.0) for r in roots], np.float32)
        asked = np.where(best < self._sure, budget, 0).astype(np.int32)
        if not self._arms.begin() or not asked.any():
            return one
        other = self._neural.propose(rows, asked, least)
        if not len(other.tokens):
            return one
        levels = np.minimum((best * _LEVELS).astype(np.int64), _LEVELS - 1)
        for i, row in enumerate(rows.tolist()):
            if roots[i] and (theirs := _roots(other, i)):
                self._said[row] = int(levels[i]), roots[i], theirs
        return merge(one, other, self.weights[levels], budget, least)

    def _learn(self, row: int, tokens: Int32) -> None:
        """From the first token behind what was drafted from."""
        if (said := self._said.pop(row, None)) is None or not len(tokens):
            return
        level, *both = said
        found = [max(each.get(int(tokens[0]), 0.0), _LEAST) for each in both]
        self._evidence[level] = _FORGET * self._evidence[level] + np.log(found)


def _roots(drafts: Drafts, row: int) -> dict[int, float]:
    """Probabilities of a row's first tokens."""
    own = slice(drafts.offsets[row], drafts.offsets[row + 1])
    first = drafts.parents[own] < 0
    return dict(
        zip(drafts.tokens[own][first].tolist(), np.exp(drafts.logp[own][first]).tolist(),
            strict=True)
    )  # fmt: skip
