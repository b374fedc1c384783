"""The interface between proposers and the engine that verifies drafts: flat arrays of ids."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasc_draft.tokens import Int32

if TYPE_CHECKING:  # it needs numba, which gateways do without
    from tasc_draft.labels import LabelTrie

# The names of draft sources, in the order of their numbers in ``Drafts.source``.
NGRAM_SOURCES = ("corpus", "prompt", "neighbours", "recent", "bigrams", "aligned")
SOURCES = (*NGRAM_SOURCES, "neural")
CORPUS, PROMPT, NEIGHBOURS, RECENT, BIGRAMS, ALIGNED, NEURAL = range(len(SOURCES))
FORCED = -1  # in place of a source: a guide allows no other token


@dataclass(frozen=True)
class Drafts:
    """Drafts for some rows, row after row in flat arrays of N draft tokens in all.

    Attributes:
        tokens: ``int32[N]`` proposed ids.
        parents: ``int32[N]`` index of the parent within the same row's draft; -1 is the row's
            current token. A chain has the parents -1, 0, 1, ...
        depths: ``int16[N]`` distance from the current token, from 1 on.
        offsets: ``int32[rows + 1]``; row i's draft is ``[offsets[i], offsets[i + 1])``.
        logp: ``float32[N]`` log-probability of the path to each token.
        source: ``int8[N]`` the source that contributed most, as an index into ``SOURCES``. The
            engine writes `FORCED` where a guide allows one token only.
    """

    tokens: Int32
    parents: Int32
    depths: NDArray[np.int16]
    offsets: Int32
    logp: NDArray[np.float32]
    source: NDArray[np.int8]

    @property
    def sizes(self) -> Int32:
        """``int32[rows]``, the number of tokens of each row's draft."""
        return self.offsets[1:] - self.offsets[:-1]

    @classmethod
    def empty(cls, rows: int) -> "Drafts":
        """Empty drafts for ``rows`` rows."""
        none, offsets = np.zeros(0, np.int32), np.zeros(rows + 1, np.int32)
        depths, source = np.zeros(0, np.int16), np.zeros(0, np.int8)
        return cls(none, none, depths, offsets, np.zeros(0, np.float32), source)


class Proposer(Protocol):
    """Makes drafts for rows. Row numbers are below a limit that is fixed at construction.

    Attributes:
        max_depth: Depth of the deepest draft it can make; 0 if it never drafts.
    """

    @property
    def max_depth(self) -> int: ...

    def start(self, row: int, prompt: Int32, labels: "LabelTrie | None" = None) -> None:
        """Start a row with the ids of its prompt. The row must not be in use.

        Args:
            labels: The answers that the row is limited to. A draft then consists of tokens that
                they allow. The caller of `observe` includes forced tokens.
        """

    def propose(
        self, rows: Int32, budget: Int32, min_probs: NDArray[np.float32] | None = None
    ) -> Drafts:
        """Draft for ``rows``, at most ``budget[i]`` tokens for ``rows[i]``.

        The arrays are valid until the next call. An empty draft is a normal result.

        Args:
            min_probs: ``float32[n]``. Token i of the step, counted over all rows, is drafted only
                if the probability of its path is at least ``min_probs[i]``; n is the budget of the
                step. By default there is no such limit.
        """

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        """Append tokens the target emitted for ``row``."""

    def finish(self, row: int) -> None:
        """Release a row, which may then be started again."""
