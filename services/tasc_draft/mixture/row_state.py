"""What is kept for each row of a batch, and how a row takes in tokens. No drafts are made here.

A row's own text is ``prompt SEP answer``; places are found in it by its canonical tokens. Tokens
are written into it as they come; everything derived from them (occurrences, corpus contexts, words
begun) is brought up to date by `catch_up` when the row is drafted for, so that taking in a token
costs next to nothing.
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing
from tasc_draft.index.aligned import begins
from tasc_draft.mixture import contexts
from tasc_draft.mixture.occurrences import NONE, append, forget

# A row.
#   length: tokens of the own text; begin: place of SEP in it; caught: tokens of it that the
#   derived state knows of; root: node of the row's root in the step before, or -1
#   contexts: see `contexts`; near_length: tokens of the neighbours' outputs; likeness: class of the
#   nearest prompt's similarity; words: of the prompt; begun: words begun in the answer
ROW = np.dtype(
    [
        ("length", np.int32), ("begin", np.int32), ("caught", np.int32), ("root", np.int32),
        ("num_contexts", np.int32), ("contexts", np.int32, (contexts.MOST, contexts.COLUMNS)),
        ("near_length", np.int32), ("likeness", np.int32), ("words", np.int32),
        ("begun", np.int32),
    ],
    align=True,
)  # fmt: skip


@borrowing
def catch_up(state: Any, row: int) -> None:
    """Bring a row's derived state up to its text."""
    it, corpus, starts = state.rows[row], state.corpus, state.starts
    text, keys, n = state.texts[row], state.own.tokens[row], it.num_contexts
    previous, last = state.own.previous[row], state.own.last[row]
    for at in range(it.caught, it.length):
        if not 0 <= text[at] < len(state.canonical):
            text[at] = state.growth[0].sep  # an id from nowhere is like nothing
        append(keys, previous, last, at, state.canonical[text[at]])
        if at >= it.begin:
            n = contexts.advance(corpus, starts, it.contexts, n, text, at)
            if at > it.begin:
                it.begun += begins_word(state.word_starts, text[at], at == it.begin + 1)
    it.num_contexts = n
    it.caught = it.length


@borrowing
def begin_again(state: Any, row: int) -> None:
    """Have a row's derived state made anew from its text, as another index tells."""
    it, own = state.rows[row], state.own
    forget(own.tokens[row], own.last[row], it.caught)
    it.caught = 0
    it.num_contexts = 0
    it.begun = 0
    it.root = NONE


@borrowing
def begins_word(word_starts: Any, token: int, first: bool) -> int:
    """1 when a token begins a word of the answer, which its first token always does."""
    return 1 if first or begins(word_starts, token) else 0
