"""Which neighbouring slots of the KV cache belong to which request: those of its longest answer.

A request gets them when it is admitted and keeps them to its end, so nothing is ever evicted. What
is free in pieces is pushed together when somebody needs it. It decides no order and knows no
tokens.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tasc_engine.errors import is_out_of_memory
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import MOST_NODES


class Holder(Protocol):
    """A request that holds slots.

    Attributes:
        needs: Slots that it holds until it ends.
        first: Its first slot; the allocator writes it.
        cached: Tokens whose keys and values are in the cache.
    """

    first: int
    cached: int

    @property
    def needs(self) -> int: ...


class KVAllocator:
    """The slots of one cache, and who holds them."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._held: list[Holder] = []  # by their first slot

    @property
    def total(self) -> int:
        return self._cache.slots

    @property
    def free(self) -> int:
        return self.total - sum(s.needs for s in self._held)

    def enter(self, sequence: Holder, moves: NDArray[np.int64]) -> bool:
        """Give a sequence its slots, if there are as many; others may move for it.

        Args:
            moves: KVAllocator that tokens are about to move from and to; they are kept right.
        """
        if sequence.needs > self.free:
            return False
        if not self._fit(sequence):
            try:
                self._push_together(moves)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return False  # until others have left
            self._fit(sequence)
        self._held.sort(key=lambda s: s.first)
        return True

    def leave(self, sequence: Holder) -> None:
        """Take a sequence's slots back."""
        self._held.remove(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is held lies within the cache and apart."""
        ends = [0, *(s.first + s.needs for s in self._held)]
        firsts = [*(s.first for s in self._held), self.total]
        assert all(end <= first for end, first in zip(ends, firsts, strict=True)), (ends, firsts)

    def _fit(self, sequence: Holder) -> bool:
        """Into the first gap that is long enough."""
        begin = 0
        for end, held in [*((s.first, s) for s in self._held), (self.total, None)]:
            if end - begin >= sequence.needs:
                sequence.first = begin
                self._held.append(sequence)
                return True
            begin = held.first + held.needs if held else end
        return False

    def _push_together(self, moves: NDArray[np.int64]) -> None:
        begin = 0
        for sequence in self._held:
            first = sequence.first
            if first > begin:
                # What it holds, and the nodes of its last draft, which are about to move.
                held = min(sequence.needs, sequence.cached + 1 + MOST_NODES)
                self._cache.shift(first, begin, held)
                own = (moves >= first) & (moves < first + sequence.needs)
                moves[own] -= first - begin
                sequence.first = begin
            begin += sequence.needs
