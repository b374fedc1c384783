"""Compiled look-up in a corpus's suffix array, and the hot table that keeps its cost constant.

An interval ``[lo, hi)`` of ``order`` at depth d is the set of grams that begin with the same d
tokens: a node of the n-gram trie. ``[0, len(order))`` at depth 0 is the root. The hot table holds
the most frequent continuations of all large intervals with several next tokens. Such intervals are
the nodes of the lcp-interval tree (Abouelhoda, Kurtz & Ohlebusch 2004).

Look-ups check no arguments: an interval must come from `narrow`, and a depth must be below the
depth of the index.
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing, compiled, read_only
from tasc_draft.drafts import Int32

END = -1
HOT = 32  # larger intervals have their continuations in the hot table
WIDEST = 8  # maximum continuations of an interval
# Columns of a continuation: its token, how often it follows, and its interval one token deeper.
TOKEN, COUNT, LO, HI = 0, 1, 2, 3
COLUMNS = 4


@borrowing
def slot_of(lo: int, depth: int, mask: int) -> int:
    """Where in the hot table the search for an interval begins."""
    key = np.uint64(lo) * np.uint64(64) + np.uint64(depth)
    return mask & int(np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)))


@borrowing
def run_end(text: Any, order: Any, at: int, hi: int, depth: int, token: int) -> int:
    """The end of the run of entries from ``at`` on with ``token`` at ``depth``, by galloping."""
    low, step = at + 1, 1
    while low < hi and text[order[min(low + step, hi) - 1] + depth] == token:
        low = min(low + step, hi)
        step *= 2
    high = min(low + step, hi)
    while low < high:
        middle = (low + high) >> 1
        if text[order[middle] + depth] == token:
            low = middle + 1
        else:
            high = middle
    return low


@borrowing
def narrow(corpus: Any, lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """The part of an interval whose token at ``depth`` is ``token``; (0, 0) if it is empty."""
    text, order = corpus.text, corpus.order
    if lo >= hi:
        return 0, 0
    if text[order[lo] + depth] == token and text[order[hi - 1] + depth] == token:
        return lo, hi
    low, high = lo, hi
    while low < high:
        middle = (low + high) >> 1
        if text[order[middle] + depth] < token:
            low = middle + 1
        else:
            high = middle
    if low == hi or text[order[low] + depth] != token:
        return 0, 0
    return low, run_end(text, order, low, hi, depth, token)


@borrowing
def count(corpus: Any, lo: int, hi: int) -> int:
    """How often the grams of an interval occur, including repeated documents."""
    return int(corpus.cumulative[hi]) - int(corpus.cumulative[lo])


@borrowing
def keep_greatest(found: Any, n: int, token: int, occurs: int, lo: int, hi: int) -> int:
    """Insert a continuation into up to WIDEST lines by falling count, after equal counts.

    Returns:
        The new number of lines.
    """
    if n == WIDEST and occurs <= found[n - 1, COUNT]:
        return n
    at = min(n, WIDEST - 1)
    while at > 0 and found[at - 1, COUNT] < occurs:
        copy(found, at - 1, found, at)
        at -= 1
    found[at, TOKEN], found[at, COUNT] = token, occurs
    found[at, LO], found[at, HI] = lo, hi
    return min(n + 1, WIDEST)


@borrowing
def copy(source: Any, i: int, target: Any, j: int) -> None:
    """Copy a continuation."""
    for column in range(COLUMNS):
        target[j, column] = source[i, column]


@borrowing
def hot(corpus: Any, lo: int, hi: int, depth: int) -> tuple[int, int]:
    """Begin and end of an interval's continuations in the hot table; (0, 0) if it has none."""
    if hi - lo <= HOT:
        return 0, 0
    slots = corpus.hot_slots
    mask = len(slots) - 1
    slot = slot_of(lo, depth, mask)
    while slots[slot, 3]:
        if slots[slot, 0] == lo and slots[slot, 1] == depth:
            return slots[slot, 2], slots[slot, 2] + slots[slot, 3]
        slot = (slot + 1) & mask
    return 0, 0


@borrowing
def scan(text: Any, order: Any, cumulative: Any, lo: int, hi: int, depth: int, found: Any) -> int:
    """Like `continuations`, but without the hot table: walks over runs of equal tokens."""
    last = text[order[hi - 1] + depth]
    n, at = 0, lo
    while at < hi:
        token = text[order[at] + depth]
        end = hi if token == last else run_end(text, order, at, hi, depth, token)
        if token != END:
            n = keep_greatest(found, n, token, cumulative[end] - cumulative[at], at, end)
        at = end
    return n


@borrowing
def continuations(corpus: Any, lo: int, hi: int, depth: int, found: Any) -> int:
    """Find the most frequent next tokens of an interval, by falling count, then by token.

    This takes constant time if the interval has one next token or is in the hot table. Otherwise,
    it walks over at most HOT entries.

    Args:
        found: ``int32[WIDEST, COLUMNS]``, filled, without END. At the root, SEP is included.

    Returns:
        The number of lines filled. If it is below WIDEST, the interval has no other next tokens.
    """
    if lo >= hi:
        return 0
    begin, end = hot(corpus, lo, hi, depth)
    if begin == end:
        return scan(corpus.text, corpus.order, corpus.cumulative, lo, hi, depth, found)
    for i in range(begin, end):
        copy(corpus.hot_next, i, found, i - begin)
    return end - begin


@borrowing
def follow(corpus: Any, lo: int, hi: int, depth: int, token: int) -> tuple[int, int, int]:
    """`narrow` and `count` in one call; uses the hot table if it has the interval."""
    begin, end = hot(corpus, lo, hi, depth)
    for i in range(begin, end):
        if corpus.hot_next[i, TOKEN] == token:
            return corpus.hot_next[i, LO], corpus.hot_next[i, HI], corpus.hot_next[i, COUNT]
    if 0 < end - begin < WIDEST:
        return 0, 0, 0
    lo, hi = narrow(corpus, lo, hi, depth, token)
    return lo, hi, count(corpus, lo, hi)


def hot_table(text: Int32, order: Int32, cumulative: Int32, depth: int) -> tuple[Int32, Int32]:
    """``hot_slots`` and ``hot_next`` of a `CorpusIndex`: continuations of each large interval.

    Args:
        text, order, cumulative: As in `CorpusIndex`.
        depth: Number of tokens by which ``order`` is sorted.
    """
    text, order, cumulative = read_only(text), read_only(order), read_only(cumulative)
    shared = common_prefixes(text, order, depth)
    # The most there can be, as intervals of one depth do not overlap. Unwritten memory is free.
    bounds = np.empty((len(order) // (HOT + 1) * depth, 3), np.int32)
    bounds = bounds[: hot_intervals(shared, depth, bounds)]
    bounds = bounds[np.lexsort((bounds[:, 1], bounds[:, 0]))]
    records, following = widest(text, order, cumulative, bounds)
    return slots_of(records), following


@compiled
def common_prefixes(text: Any, order: Any, depth: int) -> Any:
    """``uint8[S]``: number of tokens that each entry shares with the entry before; first: 0."""
    shared = np.zeros(len(order), np.uint8)
    for i in range(1, len(order)):
        a, b, k = order[i - 1], order[i], 0
        while k < depth and text[a + k] == text[b + k]:
            k += 1
        shared[i] = k
    return shared


@compiled
def hot_intervals(shared: Any, depth: int, bounds: Any) -> int:
    """Fill ``bounds`` with (lo, depth, hi) of each large interval; returns their number."""
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
    """A record (lo, depth, begin, n) for each interval, and the continuations of all intervals."""
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
    """The hash table of records by (lo, depth): open addressing, at most half full."""
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
