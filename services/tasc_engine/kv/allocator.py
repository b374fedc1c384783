"""Gives each request adjacent slots of the KV cache, enough for its longest possible answer.

A request gets its slots when it is admitted and keeps them until it ends, so nothing is evicted. If
the free slots are enough but not adjacent, requests are moved together. This module neither orders
requests nor looks at tokens.
"""

from bisect import insort
from operator import attrgetter
from typing import Protocol

from tasc_engine.config import MAX_NODES
from tasc_engine.errors import is_out_of_memory
from tasc_engine.kv.cache import RowCache


class Holder(Protocol):
    """A request that holds slots.

    Attributes:
        max_kv_slots: Number of slots that the request holds until it ends.
        kv_start: First slot of the request; set by the allocator.
        cached: Number of tokens whose keys and values are in the cache.
    """

    kv_start: int
    cached: int

    @property
    def max_kv_slots(self) -> int: ...


class KVAllocator:
    """The slots of one cache, and the requests that hold them."""

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self._held: list[Holder] = []  # ordered by first slot
        self._used = 0

    @property
    def total(self) -> int:
        return self._cache.slots

    @property
    def free(self) -> int:
        return self.total - self._used

    def enter(self, sequence: Holder) -> bool:
        """Gives a request its slots, and returns whether enough were free.

        Other requests may be moved.
        """
        if sequence.max_kv_slots > self.free:
            return False
        if (start := self._gap(sequence.max_kv_slots)) is None:
            try:
                start = self._push_together()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return False  # no memory to move requests: wait until some have left
        sequence.kv_start = start
        insort(self._held, sequence, key=attrgetter("kv_start"))
        self._used += sequence.max_kv_slots
        return True

    def leave(self, sequence: Holder) -> None:
        """Frees the slots of a request, and drops its pending moves."""
        self._held.remove(sequence)
        self._used -= sequence.max_kv_slots
        self._cache.drop_moves(sequence.kv_start, sequence.kv_start + sequence.max_kv_slots)

    def check_integrity(self) -> None:
        """Raises AssertionError if held slots overlap or exceed the cache, or free slots move."""
        ends = [0, *(s.kv_start + s.max_kv_slots for s in self._held)]
        starts = [*(s.kv_start for s in self._held), self.total]
        assert self._used == sum(s.max_kv_slots for s in self._held)
        assert all(end <= first for end, first in zip(ends, starts, strict=True)), (ends, starts)
        held = [range(s.kv_start, s.kv_start + s.max_kv_slots) for s in self._held]
        moved = self._cache.pending_moves.ravel().tolist()
        assert all(any(p in own for own in held) for p in moved), f"{moved} move, {held} are held"

    def _gap(self, size: int) -> int | None:
        """Returns the first slot of the first gap that is long enough; None if there is none."""
        begin = 0
        for held in self._held:
            if held.kv_start - begin >= size:
                return begin
            begin = held.kv_start + held.max_kv_slots
        return begin if self.total - begin >= size else None

    def _push_together(self) -> int:
        """Moves all requests to the front, and returns the first free slot."""
        begin = 0
        for sequence in self._held:
            first = sequence.kv_start
            if first > begin:
                # Cached tokens and the nodes of the last draft; the next forward pass moves nodes.
                held = min(sequence.max_kv_slots, sequence.cached + 1 + MAX_NODES)
                self._cache.shift(first, begin, held)
                sequence.kv_start = begin
            begin += sequence.max_kv_slots
        return begin
