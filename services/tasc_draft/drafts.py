"""The contract between proposers and whoever verifies drafts: flat arrays of token ids."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

# The names of draft sources, in the order of their numbers in ``Drafts.source``.
NGRAM_SOURCES = ("corpus", "prompt", "neighbours", "recent", "bigrams", "aligned")
SOURCES = (*NGRAM_SOURCES, "neural")
CORPUS, PROMPT, NEIGHBOURS, RECENT, BIGRAMS, ALIGNED, NEURAL = range(len(SOURCES))


@dataclass(frozen=True)
class Drafts:
    """Drafts for some rows, row after row in flat arrays; N is the number of all draft tokens.

    Attributes:
        tokens: ``int32[N]`` proposed ids.
        parents: ``int32[N]`` parent's place within the same row's draft; -1 is the row's
            current token. A chain has -1, 0, 1, ...
        depths: ``int16[N]`` distance from the current token, from 1.
        offsets: ``int32[rows + 1]``; row i's draft is ``[offsets[i], offsets[i + 1])``.
        logp: ``float32[N]`` log-probability of the path down to each token.
        source: ``int8[N]`` the source that contributed most, an index into ``SOURCES``.
    """

    tokens: Int32
    parents: Int32
    depths: NDArray[np.int16]
    offsets: Int32
    logp: NDArray[np.float32]
    source: NDArray[np.int8]

    @classmethod
    def empty(cls, rows: int) -> "Drafts":
        """No draft for any of so many rows."""
        none = np.zeros(0, np.int32)
        return cls(
            none, none, none.astype(np.int16), np.zeros(rows + 1, np.int32),
            none.astype(np.float32), none.astype(np.int8),
        )  # fmt: skip


class Proposer(Protocol):
    """Makes drafts for rows. Rows are small integers below a number fixed at construction.

    Attributes:
        max_depth: Depth of the deepest draft it ever makes; 0 when it never drafts.
    """

    @property
    def max_depth(self) -> int: ...

    def start(self, row: int, prompt: Int32) -> None:
        """Begin a row with its prompt ids; the row must not be in use."""

    def propose(
        self, rows: Int32, budget: Int32, least: NDArray[np.float32] | None = None
    ) -> Drafts:
        """Draft for ``rows``, at most ``budget[i]`` tokens for ``rows[i]``.

        Args:
            least: ``float32[n]`` least path probability of the i-th token of all rows together,
                what it must bring to be worth its cost; n is the budget of the step. Without it
                every token is worth it.

        The arrays are reused: they hold until the next call. An empty draft is a normal answer,
        and so is one whose tokens all turn out wrong.
        """

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        """Append tokens the target emitted for ``row``."""

    def finish(self, row: int) -> None:
        """Forget a row; afterwards it may be started again."""
