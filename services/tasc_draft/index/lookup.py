"""Compiled look-up in a corpus's suffix array: narrow an interval, list its continuations, count.

An interval ``[lo, hi)`` of ``order`` at depth d is the set of grams that begin with the same d
tokens: a node of the n-gram trie. ``[0, len(order))`` at depth 0 is its root. These functions know
neither drafts nor probabilities, allocate nothing, and trust their arguments: an interval comes
from ``narrow``, a depth is below the one the index was built with.
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import compiled

END = -1
# Intervals of more entries have their continuations in the hot table.
HOT = 32
# The most continuations of a context that are told apart.
WIDEST = 8
NONE = -1


@compiled
def slot_of(lo: int, depth: int, mask: int) -> int:
    """Where in the hot table the search for an interval begins."""
    key = np.uint64(lo) * np.uint64(64) + np.uint64(depth)
    return mask & int(np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)))


@compiled
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


@compiled
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


@compiled
def count(corpus: Any, lo: int, hi: int) -> int:
    """How often the grams of an interval occur, repeated documents counted as often as they do."""
    return int(corpus.cumulative[hi]) - int(corpus.cumulative[lo])


@compiled
def keep_greatest(tokens: Any, counts: Any, n: int, token: int, occurs: int) -> int:
    """Insert into at most WIDEST pairs by falling count; of equal counts the first one in leads."""
    if n == WIDEST and occurs <= counts[n - 1]:
        return n
    at = min(n, WIDEST - 1)
    while at > 0 and counts[at - 1] < occurs:
        tokens[at], counts[at] = tokens[at - 1], counts[at - 1]
        at -= 1
    tokens[at], counts[at] = token, occurs
    return min(n + 1, WIDEST)


@compiled
def hot_record(corpus: Any, lo: int, depth: int) -> int:
    """The hot table's record of an interval, or -1."""
    mask = len(corpus.hot_slots) - 1
    slot = slot_of(lo, depth, mask)
    while True:
        record = corpus.hot_slots[slot]
        if record < 0:
            return NONE
        if corpus.hot_keys[record, 0] == lo and corpus.hot_keys[record, 1] == depth:
            return record
        slot = (slot + 1) & mask


@compiled
def scan(
    text: Any, order: Any, cumulative: Any, lo: int, hi: int, depth: int, tokens: Any, counts: Any
) -> int:
    """What ``continuations`` returns, found by walking the runs of equal tokens."""
    last = text[order[hi - 1] + depth]
    n, at = 0, lo
    while at < hi:
        token = text[order[at] + depth]
        end = hi if token == last else run_end(text, order, at, hi, depth, token)
        if token != END:
            n = keep_greatest(tokens, counts, n, token, cumulative[end] - cumulative[at])
        at = end
    return n


@compiled
def continuations(corpus: Any, lo: int, hi: int, depth: int, tokens: Any, counts: Any) -> int:
    """The most frequent next tokens of an interval: count falling, then token rising.

    Fills ``tokens`` and ``counts``, which have room for WIDEST; END is never among them, SEP is
    (at the root). Constant time where the next token is certain or the interval is in the hot
    table, else a walk of at most HOT entries.

    Returns:
        How many were filled in.
    """
    if lo >= hi:
        return 0
    text, order = corpus.text, corpus.order
    record = NONE
    if hi - lo > HOT and text[order[lo] + depth] != text[order[hi - 1] + depth]:
        record = hot_record(corpus, lo, depth)
    if record < 0:
        return scan(text, order, corpus.cumulative, lo, hi, depth, tokens, counts)
    begin, end = corpus.hot_first[record], corpus.hot_first[record + 1]
    for i in range(begin, end):
        tokens[i - begin], counts[i - begin] = corpus.hot_tokens[i], corpus.hot_counts[i]
    return end - begin
