"""The contract between an engine and whatever says how an answer may go on."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Masks = NDArray[np.uint32]


class Guide(Protocol):
    """What one answer may say next. Owned by one sequence, moved by one thread at a time.

    A mask is a row of ``words`` words: bit b of word w is token ``32 * w + b``.
    """

    @property
    def words(self) -> int:
        """Words of a mask: a 32nd of the vocabulary, rounded up."""

    @property
    def ended(self) -> bool:
        """Whether the end of sequence has been said; nothing is allowed any more."""

    @property
    def error(self) -> str:
        """Why the answer cannot go on, and empty while it can. Nothing is allowed then."""

    def look(self, tokens: Int32, parents: Int32, kept: NDArray[np.bool_], masks: Masks) -> None:
        """Say what may come now and behind each node of a draft; the state stays as it is.

        Args:
            tokens: ``int32[n]`` a row's draft.
            parents: ``int32[n]`` each node's parent, which is in front of it; -1 is the current
                token.
            kept: ``bool[n]``, written: whether a node and all above it are allowed.
            masks: ``uint32[1 + n, words]``, written: what may come now, and at ``1 + x`` what may
                come behind node x. Those of nodes that are not kept hold anything.
        """

    def advance(self, tokens: Int32) -> None:
        """Go on by tokens that entered the answer; each was allowed at its place."""

    def forced(self, most: int) -> Int32:
        """``int32[n]`` what comes next for certain, at most so many tokens; the state stays.

        It goes on while exactly one token is allowed, and stops behind an end of sequence.
        """
