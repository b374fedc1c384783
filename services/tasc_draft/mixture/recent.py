"""Answers that were finished lately, as one bounded text that all rows draft from.

It stands in for the corpus until the next build of the index. When it is full, the older half goes.
"""

from typing import Any

from tasc_draft.compiled import borrowing
from tasc_draft.mixture import occurrences
from tasc_draft.mixture import occurrences as neighbours
from tasc_draft.mixture.tree import take_in

END = -1


@borrowing
def release(state: Any, row: int) -> None:
    """Forget a row; what it answered is remembered as long as there is room."""
    take_in(state, row)
    remember(state, row)
    own = state.own
    occurrences.forget(own.tokens[row], own.last[row], state.rows[row].caught)
    neighbours.part(state, row)
    state.rows[row].length = 0


@borrowing
def remember(state: Any, row: int) -> None:
    """Append ``SEP answer END`` to the recent answers; one longer than half of them is left out."""
    it, growth, recent = state.rows[row], state.growth[0], state.recent
    tokens, previous, last = recent.tokens[0], recent.previous[0], recent.last[0]
    size = it.length - it.begin + 1
    if size < 3 or size > len(tokens) // 2:
        return
    if growth.recent_end + size > len(tokens):
        growth.recent_end = _drop_older_half(tokens, previous, last, growth.recent_end)
    at = growth.recent_end
    for i in range(it.begin, it.length):
        occurrences.append(tokens, previous, last, at, state.texts[row, i])
        at += 1
    tokens[at] = END
    growth.recent_end = at + 1


@borrowing
def _drop_older_half(tokens: Any, previous: Any, last: Any, length: int) -> int:
    """Move the newer half to the front and enter it anew; returns its length."""
    occurrences.forget(tokens, last, length)
    at = 0
    for i in range(length // 2, length):
        if tokens[i] == END:
            tokens[at] = END
        else:
            occurrences.append(tokens, previous, last, at, tokens[i])
        at += 1
    return at
