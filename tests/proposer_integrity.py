"""Checks that the state a proposer keeps for its rows agrees with their texts.

The state is derived token by token. The check derives each part again from the text, with separate
code.
"""

from typing import Any

import numpy as np

from tasc_draft import NgramProposer
from tasc_draft.compiled import compiled
from tasc_draft.index.aligned import words
from tasc_draft.index.lookup import narrow
from tasc_draft.mixture.external_tree import MAX_ADDED, MAX_EXPONENT, SIDES
from tasc_draft.mixture.row_state import END, MAX_CONTEXT, NONE, SHORTENED

PARTS = ("length", "own text", "neighbours' outputs", "corpus contexts", "number of words")
SHARED = ("recent answers", "weights")


def check_rows(proposer: NgramProposer) -> None:
    """Derive all state of a proposer again and compare.

    Takes about as long as starting every row again. May be called between any two steps.

    Raises:
        AssertionError: The message names the first row and part found wrong.
    """
    state, memory, index = proposer.state, proposer.memory, proposer.index
    row, part = first_fault(state)
    if row != NONE:
        raise AssertionError(f"row {row}: its text contradicts its {PARTS[part]}")
    part = shared_fault(state)
    if part != NONE:
        raise AssertionError(f"the {SHARED[part]} of the proposer are damaged")
    if index.aligned is None:
        return
    hashes, lasts = (np.zeros_like(array[0]) for array in memory.words)
    for row in np.flatnonzero(memory.rows["length"]):
        it = memory.rows[row]
        prompt = memory.texts[row, : it["begin"]]
        n = words(prompt, index.word_starts, hashes, lasts)
        same = n == it["words"] and all(
            np.array_equal(kept[row, :n], derived[:n])
            for kept, derived in zip(memory.words, (hashes, lasts), strict=True)
        )
        if not same:
            raise AssertionError(f"row {row}: its prompt contradicts its words")


@compiled
def first_fault(state: Any) -> tuple[int, int]:
    """The first row with a wrong part and the number of the part; (-1, -1) if there is none."""
    own, near, sep = state.own, state.near, state.growth[0].sep
    for row in range(len(state.rows)):
        it = state.rows[row]
        caught, near_length = it.caught if it.length else 0, it.near_length
        if it.length and not _lengths_hold(it, state.texts[row], sep, len(state.nodes)):
            return row, 0
        text, keys = state.texts[row, :caught], own.tokens[row]
        if not (
            _are_keys_of(keys, text, state.canonical)
            and chained(keys, own.previous[row], own.last[row], caught)
        ):
            return row, 1
        if not (
            chained(near.tokens[row], near.previous[row], near.last[row], near_length)
            and _outputs_hold(near.tokens[row], state.near_weight[row], near_length, sep)
            and (it.length > 0 or near_length == 0)
        ):
            return row, 2
        if not it.length:
            continue
        if not _contexts_hold(state.corpus, it.contexts, it.num_contexts, text, it.begin):
            return row, 3
        if it.begun != _begun(state.word_starts, text, it.begin):
            return row, 4
    return NONE, NONE


@compiled
def shared_fault(state: Any) -> int:
    """The number of the wrong part among those that all rows share, or -1."""
    recent, end, learnt = state.recent, state.growth[0].recent_end, state.learnt
    tokens = recent.tokens[0]
    if not chained(tokens, recent.previous[0], recent.last[0], end) or (
        end > 0 and tokens[end - 1] != END
    ):
        return 0
    finite = np.isfinite(learnt.weights).all() and np.isfinite(learnt.squares).all()
    trusted = (np.abs(learnt.trust[:, :SIDES]) <= MAX_EXPONENT).all()
    trusted &= (np.abs(learnt.trust[:, SIDES:]) <= MAX_ADDED).all()
    grown = learnt.squares.min() >= 1.0 and learnt.trust_squares.min() >= 1.0
    return NONE if finite and trusted and grown else 1


@compiled
def _lengths_hold(it: Any, text: Any, sep: int, nodes: int) -> bool:
    return (
        0 <= it.begin < it.length <= len(text)
        and 0 <= it.caught <= it.length
        and text[it.begin] == sep
        and NONE <= it.root < nodes
        and 0 <= it.num_contexts <= MAX_CONTEXT
    )


@compiled
def _are_keys_of(keys: Any, text: Any, canonical: Any) -> bool:
    return bool((keys[: len(text)] == canonical[text]).all())


@compiled
def chained(tokens: Any, previous: Any, last: Any, length: int) -> bool:
    """Whether ``previous`` and ``last`` agree with ``tokens[:length]``; END is in no chain."""
    if length < 0 or length > len(tokens):
        return False
    seen = np.full(len(last), NONE)
    for i in range(length):
        token = tokens[i]
        if token >= len(last) or (token >= 0 and previous[i] != seen[token]):
            return False
        if token >= 0:
            seen[token] = i
    return bool((last == seen).all())


@compiled
def _outputs_hold(tokens: Any, weight: Any, length: int, sep: int) -> bool:
    """Whether each output begins with SEP and ends with END, in order of similarity."""
    begins, before = True, 0.0
    for i in range(length):
        if begins != (tokens[i] == sep):
            return False
        begins = tokens[i] == END
        if not begins:
            if not before <= weight[i] <= 1.01:  # rounding
                return False
            before = weight[i]
    return begins


@compiled
def _contexts_hold(corpus: Any, contexts: Any, n: int, text: Any, begin: int) -> bool:
    """Whether each context is exactly where its tokens occur, and none is missing."""
    end = len(text)
    seen, shorter = 0, MAX_CONTEXT + 1
    for i in range(n):
        tokens, lo, hi = contexts[i, 0], contexts[i, 1], contexts[i, 2]
        if not 1 <= tokens < shorter or tokens > end - begin:
            return False
        if (lo, hi) != interval(corpus, text[end - tokens :]):
            return False
        occurs = corpus.cumulative[hi] - corpus.cumulative[lo]
        if occurs <= seen:
            return False
        seen, shorter = occurs, tokens
    for tokens in range(1, min(SHORTENED, end - begin) + 1):
        lo, hi = interval(corpus, text[end - tokens :])
        known = 0
        for i in range(n):
            if contexts[i, 0] >= tokens:
                known = corpus.cumulative[contexts[i, 2]] - corpus.cumulative[contexts[i, 1]]
        if known != corpus.cumulative[hi] - corpus.cumulative[lo]:
            return False
    return True


@compiled
def interval(corpus: Any, gram: Any) -> tuple[int, int]:
    """The interval of the suffixes that begin with ``gram``; (0, 0) if there are none."""
    lo, hi = 0, len(corpus.order)
    for depth in range(len(gram)):
        lo, hi = narrow(corpus, lo, hi, depth, gram[depth])
    return lo, hi


@compiled
def _begun(word_starts: Any, text: Any, begin: int) -> int:
    """Number of words begun in the answer, which follows ``begin``."""
    n = 0
    for i in range(begin + 1, len(text)):
        token = text[i]
        n += i == begin + 1 or token >= len(word_starts) or word_starts[token]
    return n
