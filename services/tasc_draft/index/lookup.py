"""Compiled look-up in a corpus's suffix array: narrow an interval, list its continuations, count.

An interval ``[lo, hi)`` of ``order`` at depth d is the set of grams that begin with the same d
tokens: a node of the n-gram trie. ``[0, len(order))`` at depth 0 is its root. These functions know
neither drafts nor probabilities, allocate nothing, and trust their arguments: an interval comes
from ``narrow``, a depth is below the one the index was built with.
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing

END = -1
# Intervals of more entries have their continuations in the hot table.
HOT = 32
# The most continuations of a context that are told apart.
WIDEST = 8
# Of a continuation: its token, how often it follows, and its interval, one token deeper.
TOKEN, COUNT, LO, HI = 0, 1, 2, 3
COLUMNS = 4


@borrowing
def slot_of(lo: int, depth: int, mask: int) -> int:
    """Where in the hot table the search for an interval begins."""
    key = np.uint64(lo) * np.uint64(64) + np.uint64(depth)
    return mask & int(np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)))


@borrowing
def run_end(text: Any, order: Any, at: int, hi: int, depth: int, token: int) -> int:
    """Behind the last entry of ``[at, hi)`` with ``token`` at ``depth``; ``at`` has it. Gallops."""
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
    """The part of an interval whose token at ``depth`` is ``token``; an empty one is (0, 0)."""
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
    """How often the grams of an interval occur, repeated documents counted as often as they do."""
    return int(corpus.cumulative[hi]) - int(corpus.cumulative[lo])


@borrowing
def keep_greatest(found: Any, n: int, token: int, occurs: int, lo: int, hi: int) -> int:
    """Insert into at most WIDEST lines by falling count; of equal counts the first one in leads."""
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
    """Where an interval's continuations begin and end in the hot table; (0, 0) if it has none."""
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
    """What ``continuations`` returns, found by walking the runs of equal tokens."""
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
    """The most frequent next tokens of an interval: count falling, then token rising.

    Constant time where the next token is certain or the interval is in the hot table, else a walk
    of at most HOT entries.

    Args:
        found: ``int32[WIDEST, COLUMNS]``, filled; END is never among them, SEP is (at the root).

    Returns:
        How many were filled in: all there are, when fewer than WIDEST.
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
    """``narrow`` and ``count`` in one, by the hot table where it knows."""
    begin, end = hot(corpus, lo, hi, depth)
    for i in range(begin, end):
        if corpus.hot_next[i, TOKEN] == token:
            return corpus.hot_next[i, LO], corpus.hot_next[i, HI], corpus.hot_next[i, COUNT]
    if 0 < end - begin < WIDEST:
        return 0, 0, 0
    lo, hi = narrow(corpus, lo, hi, depth, token)
    return lo, hi, count(corpus, lo, hi)
