"""The hot table of a corpus index: the widest continuations of its big intervals, found once.

Intervals are the nodes of the lcp-interval tree (Abouelhoda, Kurtz & Ohlebusch 2004), which are
exactly those with two or more different next tokens. It knows no documents and no counts but the
index's own.
"""

from typing import Any, NamedTuple

import numpy as np

from tasc_draft.compiled import compiled
from tasc_draft.index.corpus_sort import read_only
from tasc_draft.index.lookup import COLUMNS, HOT, WIDEST, scan, slot_of
from tasc_draft.tokens import Int32


class HotTable(NamedTuple):
    """The hot arrays of CorpusIndex, in its order."""

    slots: Int32
    next: Int32


def hot_table(text: Int32, order: Int32, cumulative: Int32, depth: int) -> HotTable:
    """Find the continuations of every big interval of ``order``.

    Args:
        text, order, cumulative: As in CorpusIndex.
        depth: Tokens by which ``order`` is sorted.
    """
    text, order, cumulative = read_only(text), read_only(order), read_only(cumulative)
    shared = common_prefixes(text, order, depth)
    # Intervals of one depth do not overlap; memory that is not written is not taken.
    bounds = np.empty((len(order) // (HOT + 1) * depth, 3), np.int32)
    bounds = bounds[: hot_intervals(shared, depth, bounds)]
    bounds = bounds[np.lexsort((bounds[:, 1], bounds[:, 0]))]
    records, following = widest(text, order, cumulative, bounds)
    return HotTable(slots_of(records), following)


@compiled
def common_prefixes(text: Any, order: Any, depth: int) -> Any:
    """``uint8[S]``: how many tokens each entry shares with the one before it; 0 for the first."""
    shared = np.zeros(len(order), np.uint8)
    for i in range(1, len(order)):
        a, b, k = order[i - 1], order[i], 0
        while k < depth and text[a + k] == text[b + k]:
            k += 1
        shared[i] = k
    return shared


@compiled
def hot_intervals(shared: Any, depth: int, bounds: Any) -> int:
    """Fill ``bounds`` with (lo, depth, hi) of each big interval; returns how many."""
    lefts = np.zeros(depth + 1, np.int32)
    depths = np.zeros(depth + 1, np.int32)
    top, n = 0, 0
    for i in range(1, len(shared) + 1):
        now = np.int64(shared[i]) if i < len(shared) else -1
        left = i - 1
        while top > 0 and depths[top - 1] > now:
            top -= 1
            left = lefts[top]
            if i - left > HOT:
                bounds[n, 0], bounds[n, 1], bounds[n, 2] = left, depths[top], i
                n += 1
        if top == 0 or depths[top - 1] < now:
            lefts[top], depths[top] = left, now
            top += 1
    return n


@compiled
def widest(text: Any, order: Any, cumulative: Any, bounds: Any) -> tuple[Any, Any]:
    """A record (lo, depth, begin, n) of each interval, and all their continuations."""
    records = np.zeros((len(bounds), 4), np.int32)
    found = np.zeros((len(bounds) * WIDEST, COLUMNS), np.int32)
    n = 0
    for record in range(len(bounds)):
        lo, depth, hi = bounds[record]
        here = scan(text, order, cumulative, lo, hi, depth, found[n:])
        records[record, 0], records[record, 1] = lo, depth
        records[record, 2], records[record, 3] = n, here
        n += here
    return records, found[:n].copy()


@compiled
def slots_of(records: Any) -> Any:
    """The open-addressing table of records by (lo, depth), at most half full."""
    size = 1
    while size < 2 * len(records):
        size *= 2
    slots = np.zeros((size, 4), np.int32)
    for record in records:
        slot = slot_of(record[0], record[1], size - 1)
        while slots[slot, 3]:
            slot = (slot + 1) & (size - 1)
        slots[slot] = record
    return slots
