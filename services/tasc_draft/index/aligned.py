"""What follows in an answer whose words go along with the words of its prompt, as flat arrays.

A tagger's output has one word for each word of the input, so the likeliest next token is told by
the word it stands beside. The table maps contexts (``aligned_keys``) to counts of the next token.
It makes no drafts and decides no mixture; ``aligned_build`` makes it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft.errors import DraftError
from tasc_draft.index.aligned_keys import AlignedView
from tasc_draft.tokens import Int32

WIDEST = 8  # continuations kept of one context


def slots_of(keys: NDArray[np.uint32], buckets: int) -> Int32:
    """Where each bucket of ascending keys begins, ``int32[buckets + 1]``."""
    scaled = np.arange(buckets, dtype=np.uint64) << np.uint64(32)
    least = (scaled + np.uint64(buckets - 1)) // np.uint64(buckets)
    return np.append(np.searchsorted(keys, least.astype(np.uint32)), len(keys)).astype(np.int32)


@dataclass(frozen=True)
class AlignedTable:
    """Immutable counts of the next token by context.

    Attributes:
        vocab_size: The tokenizer's; every token is below it.
        head: Words of the prompt template in front of the input.
        slots: ``int32[B + 1]``; the keys with ``key * B >> 32 = b`` are ``[slots[b], slots[b+1])``.
        keys: ``uint32[K]`` hashed contexts, ascending.
        first: ``int32[K + 1]``; continuations of record r are ``[first[r], first[r + 1])``.
        tokens: ``int32[C]`` next tokens; of a record, the most frequent first, then by token.
        counts: ``int32[C]`` how often; at most ``WIDEST`` a record.
        totals: ``int32[K]`` how often the context occurs, dropped continuations included.
    """

    vocab_size: int
    head: int
    slots: Int32
    keys: NDArray[np.uint32]
    first: Int32
    tokens: Int32
    counts: Int32
    totals: Int32

    def __post_init__(self) -> None:
        # Read-only like a mapped file, so that compiled code sees one array type for both.
        for array in self.view:
            array.setflags(write=False)

    @property
    def view(self) -> AlignedView:
        """The arrays, as compiled code takes them."""
        return AlignedView(**{name: getattr(self, name) for name in AlignedView._fields})

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.view)

    def check_integrity(self) -> None:
        """Raise DraftError unless every record can be found and has continuations in order."""
        ok = (
            self.head >= 0
            and self._lengths_fit()
            and self._keys_are_in_their_buckets()
            and self._continuations_are_in_order()
        )
        if not ok:
            raise DraftError("the aligned table is inconsistent; build the index again")

    def _lengths_fit(self) -> bool:
        records, first = len(self.keys), self.first
        sizes = np.diff(first)
        return bool(
            len(self.slots) >= 2
            and len(first) == records + 1
            and len(self.totals) == records
            and first[0] == 0
            and first[-1] == len(self.tokens) == len(self.counts)
            and ((sizes >= 1) & (sizes <= WIDEST)).all()
        )

    def _keys_are_in_their_buckets(self) -> bool:
        return bool(
            (self.keys[1:] > self.keys[:-1]).all()
            and (self.slots == slots_of(self.keys, len(self.slots) - 1)).all()
        )

    def _continuations_are_in_order(self) -> bool:
        tokens, counts = self.tokens, self.counts
        records = np.repeat(np.arange(len(self.keys)), np.diff(self.first))
        same = records[1:] == records[:-1]
        falls, rises = np.diff(counts) < 0, np.diff(tokens) > 0
        sums = np.bincount(records, counts, len(self.keys))
        return bool(
            ((tokens >= 0) & (tokens < self.vocab_size)).all()
            and (counts >= 1).all()
            and (falls | ((counts[1:] == counts[:-1]) & rises))[same].all()
            and (sums <= self.totals).all()
            and (sums == self.totals)[np.diff(self.first) < WIDEST].all()
        )
