"""Two drafts of each row as one tree, and its likeliest paths: compiled, over flat arrays.

Where both say something behind a node, their probabilities are mixed; where one does, its own
count. It knows no models and no n-grams.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_engine.layout import Int32

Float32 = NDArray[np.float32]


def merge(
    one: Drafts, other: Drafts, weights: Float32, budget: Int32, least: Float32 | None
) -> Drafts:
    """The likeliest nodes of both drafts together, at most ``budget[i]`` of row i.

    Args:
        weights: ``float32[rows]``, in [0, 1]: how much what ``one`` says counts where both speak.
        least: See `tasc_draft.Proposer.propose`.
    """
    rows, most = len(budget), len(one.tokens) + len(other.tokens)
    tokens, parents, row_of = (np.zeros(most, np.int32) for _ in range(3))
    depths, source = np.zeros(most, np.int16), np.zeros(most, np.int8)
    probs, begins = np.zeros(most, np.float32), np.zeros(rows + 1, np.int32)
    n = _merge(
        one.tokens, one.parents, one.logp, one.source, one.offsets, other.tokens, other.parents,
        other.logp, other.source, other.offsets, weights, tokens, parents, row_of, depths, source,
        probs, begins,
    )  # fmt: skip
    order = np.lexsort((depths[:n], -probs[:n]))
    none = np.zeros(0, np.float32)
    kept = np.zeros(n, np.bool_)
    _take(order, row_of, probs, budget, none if least is None else least, least is not None, kept)
    chosen = order[kept[order]]
    chosen = chosen[np.argsort(row_of[chosen], kind="stable")]  # by row, the likeliest first
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(row_of[chosen], minlength=rows), out=offsets[1:])
    place = np.full(n + 1, -1, np.int32)
    place[chosen] = np.arange(len(chosen), dtype=np.int32) - offsets[row_of[chosen]]
    above = parents[chosen]
    behind = np.where(above < 0, n, above + begins[row_of[chosen]])
    return Drafts(
        tokens[chosen], place[behind], depths[chosen], offsets, np.log(probs[chosen]),
        source[chosen],
    )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _merge(
    a_tokens: Any, a_parents: Any, a_logp: Any, a_source: Any, a_offsets: Any, b_tokens: Any,
    b_parents: Any, b_logp: Any, b_source: Any, b_offsets: Any, weights: Any, tokens: Any,
    parents: Any, row_of: Any, depths: Any, source: Any, probs: Any, begins: Any,
) -> int:  # fmt: skip
    """Nodes of a row, parents first; parents are places within the row."""
    n = 0
    for row in range(len(weights)):
        begin = begins[row] = n
        first, size_a = a_offsets[row], a_offsets[row + 1] - a_offsets[row]
        start, size_b = b_offsets[row], b_offsets[row + 1] - b_offsets[row]
        at_a, at_b = np.full(size_a, -1, np.int32), np.full(size_b, -1, np.int32)
        own, others = np.zeros((2, size_a + size_b), np.float32)
        says_a, says_b = np.zeros((2, size_a + size_b + 1), np.bool_)  # of what is behind a node
        for x in range(size_a):
            up = a_parents[first + x]
            above = at_a[up] if up >= 0 else -1
            at_a[x] = n - begin
            own[n - begin] = np.exp(a_logp[first + x] - (a_logp[first + up] if up >= 0 else 0.0))
            says_a[above + 1] = True
            tokens[n], parents[n], source[n] = a_tokens[first + x], above, a_source[first + x]
            n += 1
        for x in range(size_b):
            up = b_parents[start + x]
            above, at = at_b[up] if up >= 0 else -1, begin
            while at < n and (parents[at] != above or tokens[at] != b_tokens[start + x]):
                at += 1
            if at == n:
                tokens[n], parents[n], source[n] = b_tokens[start + x], above, b_source[start + x]
                n += 1
            at_b[x] = at - begin
            others[at - begin] = np.exp(
                b_logp[start + x] - (b_logp[start + up] if up >= 0 else 0.0)
            )
            says_b[above + 1] = True
        weight = weights[row]
        for at in range(begin, n):
            above, x = parents[at], at - begin
            share = (1.0 if not says_b[above + 1] else weight) if says_a[above + 1] else 0.0
            prob = share * own[x] + (1 - share) * others[x]
            if (1 - share) * others[x] > share * own[x]:
                source[at] = b_source[start] if size_b else source[at]
            row_of[at] = row
            probs[at] = prob * (probs[begin + above] if above >= 0 else 1.0)
            depths[at] = 1 + (depths[begin + above] if above >= 0 else 0)
    begins[len(weights)] = n
    return n


@numba.njit(cache=True, nogil=True)
def _take(
    order: Any, row_of: Any, probs: Any, budget: Any, least: Any, limited: bool, kept: Any
) -> None:
    """The likeliest first, while each is worth its cost and its row has room."""
    taken, left = 0, budget.copy()
    for at in order:
        if limited and (taken == len(least) or probs[at] < least[taken]):
            return
        if probs[at] > 0 and left[row_of[at]] > 0:
            left[row_of[at]] -= 1
            kept[at] = True
            taken += 1
