"""Which contexts of an answer's end occur in the corpus. It draws no conclusion from them.

A context is ``(tokens, lo, hi)``: its length and its interval in the suffix array. A context that
occurs exactly as often as a longer one says nothing the longer one does not, now or later, so only
contexts of different counts are kept, the longest first.
"""

from typing import Any

from tasc_draft.compiled import compiled
from tasc_draft.index.lookup import count, narrow

MOST = 12  # tokens of a row's longest context, and so the most contexts of a row
AGAIN = 8  # a context of MOST tokens is cut to its last AGAIN before it grows on


@compiled
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
        lo, hi = narrow(corpus, lo, hi, tokens, token)
        kept, seen = _keep(corpus, contexts, kept, seen, tokens + 1, lo, hi)
    kept, seen = _keep(corpus, contexts, kept, seen, 1, starts[token], starts[token + 1])
    return kept


@compiled
def match(corpus: Any, starts: Any, text: Any, end: int, tokens: int) -> tuple[int, int, int]:
    """The context of the last ``tokens`` tokens up to ``end``, which is known to occur."""
    first = text[end - tokens + 1]
    lo, hi = starts[first], starts[first + 1]
    for k in range(1, tokens):
        lo, hi = narrow(corpus, lo, hi, k, text[end - tokens + 1 + k])
    return tokens, lo, hi


@compiled
def _keep(
    corpus: Any, contexts: Any, kept: int, seen: int, tokens: int, lo: int, hi: int
) -> tuple[int, int]:
    """Enter a context unless it is empty or occurs as often as the one before it."""
    occurs = count(corpus, lo, hi) if hi > lo else 0
    if occurs > seen:
        contexts[kept, 0] = tokens
        contexts[kept, 1] = lo
        contexts[kept, 2] = hi
        return kept + 1, occurs
    return kept, seen


@compiled
def pick(corpus: Any, contexts: Any, n: int, times: int, most: int, picked: Any) -> int:
    """The longest context, then each next one that occurs ``times`` as often; at most ``most``."""
    m, seen = 0, 0
    for i in range(n):
        occurs = count(corpus, contexts[i, 1], contexts[i, 2])
        if m < most and occurs >= times * seen:
            picked[m] = contexts[i]
            seen = occurs
            m += 1
    return m


@compiled
def extend(
    corpus: Any, starts: Any, parents: Any, n: int, token: int, longest: int, most: int, found: Any
) -> int:
    """A tree node's contexts from its parent's, and the token alone where there is room.

    Args:
        longest: Tokens a context may have, below the depth to which suffixes are sorted.
    """
    m = 0
    for i in range(n):
        tokens = parents[i, 0]
        if tokens >= longest:
            continue
        lo, hi = narrow(corpus, parents[i, 1], parents[i, 2], tokens, token)
        if hi > lo:
            found[m, 0] = tokens + 1
            found[m, 1] = lo
            found[m, 2] = hi
            m += 1
    if m < most and starts[token + 1] > starts[token]:
        found[m, 0] = 1
        found[m, 1] = starts[token]
        found[m, 2] = starts[token + 1]
        m += 1
    return m
