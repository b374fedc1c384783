"""Learning a task's weights from held-out answers, token by token. It chooses no rows."""

from typing import Any

from tasc_draft.compiled import borrowing
from tasc_draft.mixture import evidence
from tasc_draft.mixture.candidates import learn
from tasc_draft.mixture.row_state import catch_up
from tasc_draft.mixture.tree import look_into


@borrowing
def teach(state: Any, row: int, answer: Any, rate: float) -> None:
    """Learn from each token of an answer to the prompt that ``row`` was started with.

    Args:
        answer: ``int32[n]``, its end-of-sequence included.
    """
    it, text, learnt = state.rows[row], state.texts[row], state.learnt
    for token in answer:
        catch_up(state, row)
        evidence.root(state, 0, row)
        look_into(state, 0)
        learn(learnt.weights, learnt.squares, state.nodes[0], token, rate)
        text[it.length] = token
        it.length += 1
