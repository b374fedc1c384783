"""Where the end of an answer occurred before in a local text, and the neighbours' outputs as one.

A local text is a row's prompt and answer, the outputs of the training rows whose prompts are most
similar (its neighbours), or the recent answers that all rows share. ``previous[i]`` is the last
place before i with the same token, ``last[t]`` the last place of token t; both are ``NONE`` where
there is none. A place stands for the token at it: what follows it is a continuation.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.index import weights as cells
from tasc_draft.index.inputs import nearest
from tasc_draft.tokens import Int32

NONE = -1
MAX_WALK = 128  # places of one token that are looked at; bounds the time of a draft
MAX_AGREEING = 8  # tokens compared in front of a place


class LocalTexts(NamedTuple):
    """One local text for each row.

    Attributes:
        tokens: ``int32[rows, capacity]``.
        previous: ``int32[rows, capacity]``.
        last: ``int32[rows, ids]``.
    """

    tokens: Int32
    previous: Int32
    last: Int32

    @classmethod
    def empty(cls, rows: int, capacity: int, ids: int) -> "LocalTexts":
        shape = (rows, capacity)
        return cls(
            np.zeros(shape, np.int32),
            np.full(shape, NONE, np.int32),
            np.full((rows, ids), NONE, np.int32),
        )


@borrowing
def append(tokens: Any, previous: Any, last: Any, at: int, token: int) -> None:
    """Enter ``token`` at place ``at`` of a row's text."""
    tokens[at] = token
    previous[at] = last[token]
    last[token] = at


@borrowing
def forget(tokens: Any, last: Any, length: int) -> None:
    """Clear a row's occurrence table by the tokens it touched, not by the whole vocabulary."""
    for i in range(length):
        if tokens[i] >= 0:
            last[tokens[i]] = NONE


@borrowing
def agreeing(tokens: Any, place: int, text: Any, end: int) -> int:
    """How many tokens up to ``place`` are those of ``text`` up to ``end``, at most MAX_AGREEING."""
    n = 1
    most = min(MAX_AGREEING, place + 1, end + 1)
    while n < most and tokens[place - n] == text[end - n]:
        n += 1
    return n


@borrowing
def find(
    tokens: Any, previous: Any, last: Any, followed: int, text: Any, end: int, found: Any
) -> int:
    """Fill ``found[i] = (place, agreeing tokens)`` for the end of ``text``, newest places first.

    Only places below ``followed`` count: those have a continuation. Returns how many.
    """
    n, walked, place = 0, 0, last[text[end]]
    while place >= 0 and n < len(found) and walked < MAX_WALK:
        if place < followed:
            found[n, 0] = place
            found[n, 1] = agreeing(tokens, place, text, end)
            n += 1
        place = previous[place]
        walked += 1
    return n


@borrowing
def extend(
    tokens: Any, previous: Any, last: Any, followed: int, parents: Any, num_parents: int,
    token: int, found: Any,
) -> int:  # fmt: skip
    """Places for a context one ``token`` longer than that of ``parents``; returns how many.

    When no place goes on with ``token``, any place of it will do.
    """
    n = 0
    for i in range(num_parents):
        place = parents[i, 0] + 1
        if tokens[place] == token and place < followed:
            found[n, 0] = place
            found[n, 1] = parents[i, 1] + 1
            n += 1
    if n:
        return n
    walked, place = 0, last[token]
    while place >= 0 and n < len(found) and walked < MAX_WALK:
        if place < followed:
            found[n, 0] = place
            found[n, 1] = 1
            n += 1
        place = previous[place]
        walked += 1
    return n


OUTPUT_TOKENS = 512  # of one neighbour's output that are used
END = -1


class Found(NamedTuple):
    """Scratch of a search: ``int32[k]`` rows and ``float32[k]`` their similarities."""

    rows: Int32
    similarity: NDArray[np.float32]

    @classmethod
    def empty(cls, k: int) -> "Found":
        return cls(np.zeros(k, np.int32), np.zeros(k, np.float32))


@compiled
def meet(
    state: Any, offsets: Any, inputs: Any, scratch: Any, found: Any, row: int, prompt: Any
) -> None:
    """Fill a row's neighbours' outputs, the most alike last, as many whole ones as there is room.

    Args:
        offsets: ``int32[D + 1]`` where each distinct output begins in the corpus's text.
        inputs, scratch: See `nearest`.
        prompt: ``int32[n]``.
    """
    it, near, text = state.rows[row], state.near, state.corpus.text
    tokens, previous, last = near.tokens[row], near.previous[row], near.last[row]
    weights = state.near_weight[row]
    n = nearest(inputs, prompt, scratch, found.rows, found.similarity)
    it.likeness = cells.similarity_class(found.similarity[0] if n else 0.0)
    at = 0
    for i in range(_fitting(offsets, inputs.documents, found.rows, n, len(tokens)) - 1, -1, -1):
        document = inputs.documents[found.rows[i]]
        begin, length = offsets[document], _length(offsets, document)
        for j in range(length - 1):
            append(tokens, previous, last, at, text[begin + j])
            weights[at] = found.similarity[i] ** 2
            at += 1
        tokens[at] = END
        at += 1
    it.near_length = at


@compiled
def part(state: Any, row: int) -> None:
    """Forget a row's neighbours."""
    near, it = state.near, state.rows[row]
    forget(near.tokens[row], near.last[row], it.near_length)
    it.near_length = 0


@compiled
def _fitting(offsets: Any, documents: Any, rows: Any, n: int, room: int) -> int:
    """How many of the nearest rows' outputs there is room for."""
    for i in range(n):
        room -= _length(offsets, documents[rows[i]])
        if room < 0:
            return i
    return n


@compiled
def _length(offsets: Any, document: int) -> int:
    """Tokens of a neighbour's output with SEP, EOS and END, cut to what is used."""
    return min(offsets[document + 1] - offsets[document], OUTPUT_TOKENS + 3)
