"""Types that proposers share with the engine: arrays of token ids, drafts, and errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class TokensView(NamedTuple):
    """The arrays of `Tokens` for compiled code."""

    ids: Any
    offsets: Any


@dataclass(frozen=True)
class Tokens:
    """Token ids of many texts, one after the other.

    Attributes:
        ids: ``int32[tokens]``.
        lengths: ``int64[texts]``, the number of tokens of each text.
    """

    ids: Int32
    lengths: Int64

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> "Tokens":
        lengths = np.fromiter((len(t) for t in texts), np.int64, len(texts))
        ids = np.fromiter((i for t in texts for i in t), np.int32, int(lengths.sum()))
        return cls(ids, lengths)

    @property
    def offsets(self) -> Int64:
        """``int64[texts + 1]``; text i is ``ids[offsets[i]:offsets[i + 1]]``."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def view(self) -> TokensView:
        return TokensView(self.ids, self.offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, texts: NDArray[np.int64]) -> "Tokens":
        """The texts with these numbers, in this order."""
        offsets = self.offsets
        parts = [self.ids[offsets[i] : offsets[i + 1]] for i in texts]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return Tokens(ids.astype(np.int32, copy=False), self.lengths[texts])


def is_first(values: NDArray[Any]) -> NDArray[np.bool_]:
    """``bool[n]``: whether a value differs from the one before it."""
    first = np.ones(len(values), bool)
    first[1:] = values[1:] != values[:-1]
    return first


# The names of draft sources, in the order of their numbers in ``Drafts.source``.
NGRAM_SOURCES = ("corpus", "prompt", "neighbours", "recent", "bigrams", "aligned")
SOURCES = (*NGRAM_SOURCES, "neural", "vllm")  # vLLM does not tell the sources of drafts apart
CORPUS, PROMPT, NEIGHBOURS, RECENT, BIGRAMS, ALIGNED, NEURAL, VLLM = range(len(SOURCES))
FORCED = -1  # in ``Drafts.source``: the guide allows only this token


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
            engine writes `FORCED` if a guide allows only one token.
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

    def copy(self) -> "Drafts":
        """The same drafts in arrays that a proposer does not write to."""
        return Drafts(*(array.copy() for array in vars(self).values()))

    @classmethod
    def empty(cls, rows: int) -> "Drafts":
        """Empty drafts for ``rows`` rows."""
        none, offsets = np.zeros(0, np.int32), np.zeros(rows + 1, np.int32)
        depths, source = np.zeros(0, np.int16), np.zeros(0, np.int8)
        return cls(none, none, depths, offsets, np.zeros(0, np.float32), source)


class Proposer(Protocol):
    """Makes drafts for rows. Row numbers are below a limit that is fixed at construction.

    Attributes:
        max_depth: Depth of the deepest draft that the proposer can make; 0 if it never drafts.
    """

    @property
    def max_depth(self) -> int: ...

    def start(self, row: int, prompt: Int32, labels: Any = None) -> None:
        """Start a row with the ids of its prompt. The row must not be in use.

        Args:
            labels: The answers that the row is limited to, a `LabelTrie`; None: no limit. With
                labels, a draft has only tokens that the labels allow, and calls of `observe` must
                include forced tokens.
        """

    def propose(
        self, rows: Int32, budget: Int32, min_probs: NDArray[np.float32] | None = None
    ) -> Drafts:
        """Draft for ``rows``, at most ``budget[i]`` tokens for ``rows[i]``.

        The returned arrays are valid until the next call. An empty draft is a normal result.

        Args:
            min_probs: ``float32[n]``. Token i of the step, counted over all rows, is drafted only
                if the probability of its path is at least ``min_probs[i]``; n is the budget of the
                step. By default there is no such limit.
        """

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        """Append tokens that the target emitted for ``row``."""

    def finish(self, row: int) -> None:
        """Release a row, which may then be started again."""


class DraftError(ValueError):
    """Base class of this package's errors."""


class IndexFileError(DraftError):
    """A file is not a draft index, is truncated or damaged, or has another format version."""


class IndexFormatError(IndexFileError):
    """An index file is undamaged, but has a format version that this program does not read."""
