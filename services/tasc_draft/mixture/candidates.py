"""A node of the draft tree: its candidates for the next token and what each source says of them.

It collects evidence; what the evidence is worth is the weights' business (`scoring`), and which
node is grown is the tree's (`tree`).
"""

from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing
from tasc_draft.index.cells import CONTEXTS, SLOTS
from tasc_draft.index.lookup import WIDEST
from tasc_draft.mixture.contexts import COLUMNS, MOST

WIDTH = 48  # candidates of a node
ROOM = WIDTH + 32  # with those that only a guest names
PLACES = 48  # places in a local text that a node looks at
RECENT_PLACES = 16  # of recent answers: more cost much and say little
SILENT = -1  # the base of a slot whose source does not speak at a node
NONE = -1

# A node of a step's trees. One that was not looked into has no candidates (wide 0).
#   row, line: the row, and its place in the batch; place: the node's place in the row's draft
#   parent, first_child, sibling: nodes, or NONE; path: probability of the path down to the node
#   source: number of the source that contributed most; words: begun in the answer so far
#   contexts: of the corpus; known: continuations of the first of them, -1 where not looked up
#   near, own, recent: (place, agreeing tokens) in the local texts
#   bases: cell at which a slot's levels begin, or SILENT; other: cell of "none of the candidates"
#   chance: of each candidate, negated once it is a node; next: the candidate that waits on the heap
#   wide: candidates with a guest's behind the n-grams' own; see `guests` for what follows
#   guest: node of the guest's tree that this one is, if that says more, or NONE
#   guess: what the guest says of each candidate
#   floor, rest: of n-grams and guest, for a candidate they did not name, and for all other tokens
#   mixed, none: chances by both, of each candidate (negated once it is a node) and of others
#   cell: of `guests`, by which both were trusted, where n-grams say something
NODE = np.dtype(
    [
        ("row", np.int32), ("line", np.int32), ("place", np.int32), ("parent", np.int32),
        ("first_child", np.int32), ("sibling", np.int32), ("depth", np.int32),
        ("token", np.int32), ("path", np.float32), ("source", np.int32), ("words", np.int32),
        ("num_contexts", np.int32), ("contexts", np.int32, (MOST, COLUMNS)),
        ("num_known", np.int32, (CONTEXTS,)), ("known", np.int32, (CONTEXTS, WIDEST, COLUMNS)),
        ("num_near", np.int32), ("near", np.int32, (PLACES, 2)),
        ("num_own", np.int32), ("own", np.int32, (PLACES, 2)),
        ("num_recent", np.int32), ("recent", np.int32, (RECENT_PLACES, 2)),
        ("width", np.int32), ("candidates", np.int32, (ROOM,)),
        ("bases", np.int32, (SLOTS,)), ("levels", np.int8, (ROOM, SLOTS)),
        ("chance", np.float32, (ROOM,)), ("other", np.int32), ("other_chance", np.float32),
        ("next", np.int32),
        ("wide", np.int32), ("guest", np.int32), ("guess", np.float32, (ROOM,)),
        ("floor", np.float32, (2,)), ("rest", np.float32, (2,)), ("mixed", np.float32, (ROOM,)),
        ("none", np.float32), ("cell", np.int32),
    ],
    align=True,
)  # fmt: skip


@borrowing
def clear(node: Any) -> None:
    node.width = 0
    node.bases[:] = SILENT


@borrowing
def candidate(node: Any, token: int) -> int:
    """The place of ``token`` among a node's candidates, entered if need be.

    NONE when there is no room, and for END, which a cut output may have behind it.
    """
    if token < 0:
        return NONE
    n = node.width
    for i in range(n):
        if node.candidates[i] == token:
            return i
    if n == WIDTH:
        return NONE
    node.candidates[n] = token
    node.levels[n, :] = 0
    node.chance[n] = 0.0
    node.width = n + 1
    return n


@borrowing
def vote(node: Any, slot: int, token: int, level: int) -> None:
    """Note that ``slot`` speaks for ``token`` with this much of its evidence."""
    i = candidate(node, token)
    if i >= 0:
        node.levels[i, slot] = level
