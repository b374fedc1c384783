"""Many token sequences in two flat arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        lengths: ``int64[texts]``, summing to the number of ids.
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
