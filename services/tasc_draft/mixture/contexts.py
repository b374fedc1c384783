"""Which contexts of an answer's end occur in the corpus. It draws no conclusion from them.

A context is ``(tokens, lo, hi, occurs)``: its length, its interval in the suffix array and how
often it occurs. One that occurs exactly as often as a longer one says nothing the longer one does
not, now or later, so only contexts of different counts are kept, the longest first.
"""

from typing import Any

from tasc_draft.compiled import borrowing
from tasc_draft.index.lookup import COUNT, HI, LO, TOKEN, WIDEST, count, follow
from tasc_draft.index.weights import CONTEXTS

COLUMNS = 4
MOST = 12  # tokens of a row's longest context, and so the most contexts of a row
AGAIN = 8  # a context of MOST tokens is cut to its last AGAIN before it grows on


@borrowing
def advance(corpus: Any, starts: Any, contexts: Any, n: int, text: Any, end: int) -> int:
    """Move a row's contexts on by the token ``text[end]``, in place; returns how many there are.

    Args:
        starts: ``int32[ids + 1]`` where each first token's suffixes begin in the suffix array.
    """
    token = text[end]
    kept, seen = 0, 0
    for i in range(n):
        tokens, lo, hi = contexts[i, 0], contexts[i, 1], contexts[i, 2]
        if tokens >= MOST:
            tokens, lo, hi = match(corpus, starts, text, end - 1, AGAIN)
        lo, hi, occurs = follow(corpus, lo, hi, tokens, token)
        if occurs > seen:  # else it is empty or says nothing that the one before it does not
            _enter(contexts, kept, tokens + 1, lo, hi, occurs)
            kept, seen = kept + 1, occurs
    lo, hi = starts[token], starts[token + 1]
    occurs = count(corpus, lo, hi)
    if occurs > seen:
        _enter(contexts, kept, 1, lo, hi, occurs)
        kept += 1
    return kept


@borrowing
def match(corpus: Any, starts: Any, text: Any, end: int, tokens: int) -> tuple[int, int, int]:
    """The context of the last ``tokens`` tokens up to ``end``, which is known to occur."""
    first = text[end - tokens + 1]
    lo, hi = starts[first], starts[first + 1]
    for k in range(1, tokens):
        lo, hi, _ = follow(corpus, lo, hi, k, text[end - tokens + 1 + k])
    return tokens, lo, hi


@borrowing
def pick(contexts: Any, n: int, times: int, most: int, picked: Any) -> int:
    """The longest context, then each next one that occurs ``times`` as often; at most ``most``."""
    m, seen = 0, 0
    for i in range(n):
        if m < most and contexts[i, 3] >= times * seen:
            seen = contexts[i, 3]
            _enter(picked, m, contexts[i, 0], contexts[i, 1], contexts[i, 2], seen)
            m += 1
    return m


@borrowing
def extend_context(
    corpus: Any, starts: Any, parent: Any, token: int, longest: int, most: int, node: Any
) -> int:
    """A tree node's contexts from its parent's, and the token alone where there is room.

    Args:
        longest: Tokens a context may have, below the depth to which suffixes are sorted.

    Returns:
        How many there are.
    """
    m = 0
    for i in range(parent.num_contexts):
        tokens = parent.contexts[i, 0]
        if tokens >= longest:
            continue
        lo, hi, occurs = _grown(corpus, parent, i, token)
        if hi > lo:
            _enter(node.contexts, m, tokens + 1, lo, hi, occurs)
            m += 1
    lo, hi = starts[token], starts[token + 1]
    if m < most and hi > lo:
        _enter(node.contexts, m, 1, lo, hi, count(corpus, lo, hi))
        m += 1
    return m


@borrowing
def _grown(corpus: Any, parent: Any, i: int, token: int) -> tuple[int, int, int]:
    """The interval of a node's i-th context and ``token``, and how often it occurs."""
    n = parent.num_known[i] if i < CONTEXTS else -1
    for j in range(n):
        known = parent.known[i, j]
        if known[TOKEN] == token:
            return known[LO], known[HI], known[COUNT]
    if 0 <= n < WIDEST:
        return 0, 0, 0
    lo, hi = parent.contexts[i, 1], parent.contexts[i, 2]
    return follow(corpus, lo, hi, parent.contexts[i, 0], token)


@borrowing
def _enter(contexts: Any, i: int, tokens: int, lo: int, hi: int, occurs: int) -> None:
    contexts[i, 0], contexts[i, 1] = tokens, lo
    contexts[i, 2], contexts[i, 3] = hi, occurs
