"""The outputs of the training rows whose prompts are most like this one, as a row's local text.

What is likely for this prompt is what was said to prompts like it. It finds rows and copies their
outputs; what they are worth as evidence is the weights' business.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.index import cells
from tasc_draft.index.nearest import nearest
from tasc_draft.mixture.occurrences import append, forget
from tasc_draft.tokens import Int32

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
    it.likeness = cells.likeness_class(found.similarity[0] if n else 0.0)
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
