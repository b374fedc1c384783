"""Gives each request adjacent slots of the KV cache, enough for its longest possible answer.

A request gets its slots when it is admitted and keeps them until it ends, so nothing is evicted. If
the free slots are enough but not adjacent, requests are moved together. This module neither orders
requests nor looks at tokens.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tasc_engine.config import MOST_NODES
from tasc_engine.errors import is_out_of_memory
from tasc_engine.kv.cache import RowCache


class Holder(Protocol):
    """A request that holds slots.

    Attributes:
        needs: Number of slots that it holds until it ends.
        first: Its first slot; set by the allocator.
        cached: Number of tokens whose keys and values are in the cache.
    """

    first: int
    cached: int

    @property
    def needs(self) -> int: ...


class KVAllocator:
    """The slots of one cache, and the requests that hold them."""

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
        """Gives a request its slots, and returns whether enough were free; others may be moved.

        Args:
            moves: Slots of copies that are due in the next forward pass, from and to. They are
                updated if their request is moved.
        """
        if sequence.needs > self.free:
            return False
        if not self._fit(sequence):
            try:
                self._push_together(moves)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return False  # no memory to move requests: wait until others have left
            self._fit(sequence)
        self._held.sort(key=lambda s: s.first)
        return True

    def leave(self, sequence: Holder) -> None:
        """Frees the slots of a request."""
        self._held.remove(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError if held slots overlap or exceed the cache."""
        ends = [0, *(s.first + s.needs for s in self._held)]
        firsts = [*(s.first for s in self._held), self.total]
        assert all(end <= first for end, first in zip(ends, firsts, strict=True)), (ends, firsts)

    def _fit(self, sequence: Holder) -> bool:
        """Puts a request into the first gap that is long enough; False if there is none."""
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
                # Cached tokens, and nodes of the last draft, which the next forward pass moves.
                held = min(sequence.needs, sequence.cached + 1 + MOST_NODES)
                self._cache.shift(first, begin, held)
                own = (moves >= first) & (moves < first + sequence.needs)
                moves[own] -= first - begin
                sequence.first = begin
            begin += sequence.needs
