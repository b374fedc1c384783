"""Another proposer's tree as a guest in the n-grams' own: nodes of both, over one heap. Compiled.

Where a node of the tree is one of the guest's too, what both say of the next token v is mixed:
p(v) = p_ngrams(v)^a * p_guest(v)^b / Z, and the exponents a and b, how much each is trusted, are
learnt from the tokens that the target did emit, as the weights of n-grams are (`scoring`). N-grams
go on behind a token that only the guest knew, and the other way round. It knows neither the guest
nor its model.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.drafts import Drafts
from tasc_draft.mixture.candidates import NONE, ROOM
from tasc_draft.tokens import Int32

SURE = (0.5, 0.9)  # where the n-grams' likeliest token has more, they are trusted by another cell
CELLS = 2 * 2 * (len(SURE) + 1)
FIRST_TRUST = 0.5  # of each of the two
MOST_TRUST = 2.0
RATE = 0.1
UNNAMED = 0.5  # of what somebody leaves to others: the share of what the other one names
LEAST = 1e-5  # probability


class Guest(NamedTuple):
    """A guest's trees: a root for each row of the step, then its nodes in the order of its drafts.

    Attributes:
        tokens: ``int32[rows + N]``.
        probs: ``float32[rows + N]`` of each token behind its parent.
        first, sibling: ``int32[rows + N]`` nodes, or NONE.
        rows: ``int32[1]``, number of roots.
    """

    tokens: Int32
    probs: NDArray[np.float32]
    first: Int32
    sibling: Int32
    rows: Int32


def guest_of(drafts: Drafts) -> Guest:
    """The trees of drafts for some rows, which must be trees of ids."""
    guest = _guest(len(drafts.offsets) - 1, len(drafts.tokens))
    _link(drafts.tokens, drafts.parents, drafts.logp, drafts.offsets, guest)
    return guest


def _guest(rows: int, tokens: int) -> Guest:
    nodes = rows + tokens
    first, sibling = np.full((2, nodes), NONE, np.int32)
    return Guest(
        np.zeros(nodes, np.int32), np.zeros(nodes, np.float32), first, sibling,
        np.full(1, rows, np.int32),
    )  # fmt: skip


NOBODY = _guest(0, 0)


@compiled
def _link(tokens: Any, parents: Any, logp: Any, offsets: Any, guest: Any) -> None:
    """Backwards, so that siblings follow in the order of the drafts, the likeliest first."""
    rows = guest.rows[0]
    for row in range(rows):
        begin = offsets[row]
        for x in range(offsets[row + 1] - 1, begin - 1, -1):
            deeper = parents[x] >= 0
            above = begin + parents[x]
            up, node = rows + above if deeper else row, rows + x
            guest.tokens[node] = tokens[x]
            guest.probs[node] = min(math.exp(logp[x] - (logp[above] if deeper else 0.0)), 1.0)
            guest.sibling[node] = guest.first[up]
            guest.first[up] = node


@borrowing
def root(guest: Any, line: int) -> int:
    """The guest's node for the root of the batch's ``line``; NONE if it drafted nothing."""
    return line if line < guest.rows[0] and guest.first[line] != NONE else NONE


@borrowing
def child(guest: Any, x: int, token: int) -> int:
    """The guest's node of ``token`` behind its node ``x``, if it has more behind that; or NONE."""
    if x == NONE:
        return NONE
    y = guest.first[x]
    while y != NONE and guest.tokens[y] != token:
        y = guest.sibling[y]
    return y if y != NONE and guest.first[y] != NONE else NONE


@borrowing
def mix(trust: Any, node: Any, guest: Any) -> None:
    """Enter the guest's candidates at a node that was looked into, and mix what both say."""
    others, x = 1.0, guest.first[node.guest]
    node.guess[: node.wide] = 0.0
    while x != NONE:
        i = _place(node, guest.tokens[x])
        if i != NONE:
            node.guess[i] = guest.probs[x]
            others -= guest.probs[x]
        x = guest.sibling[x]
    if node.width == 0:  # n-grams say nothing
        node.cell = NONE
        for i in range(node.wide):
            node.mixed[i] = node.guess[i]
        return
    own, best = 1.0, 0.0
    for i in range(node.wide):
        own -= node.chance[i]
        best = max(best, node.chance[i])
    _leave(node, 0, node.chance, own)
    _leave(node, 1, node.guess, others)
    node.cell = _cell(best, node.depth)
    _multiply(trust[node.cell], trust[node.cell + 1], node)


@borrowing
def chance(node: Any, i: int) -> float:
    """Of a node's candidate; negative or 0 once it is in the tree."""
    return node.chance[i] if node.guest == NONE else node.mixed[i]


@borrowing
def take(trust: Any, node: Any, i: int) -> bool:
    """Note that a candidate is in the tree; whether the guest raised it more than n-grams did."""
    if node.guest == NONE:
        node.chance[i] = -node.chance[i]
        return False
    node.mixed[i] = -node.mixed[i]
    if node.cell == NONE:
        return True
    by_own = trust[node.cell] * (_log(node, 0, node.chance[i]) - math.log(node.rest[0]))
    by_guest = trust[node.cell + 1] * (_log(node, 1, node.guess[i]) - math.log(node.rest[1]))
    node.chance[i] = -node.chance[i]
    return by_guest > by_own


@borrowing
def learn(learnt: Any, node: Any, token: int) -> None:
    """One step of gradient ascent on the likelihood of ``token`` by both exponents (AdaGrad)."""
    if node.cell == NONE:
        return
    own, others = math.log(node.rest[0]), math.log(node.rest[1])
    by_own, by_guest = -node.none * own, -node.none * others  # minus what was expected
    for i in range(node.wide):
        log_own, log_guess = _log(node, 0, node.chance[i]), _log(node, 1, node.guess[i])
        by_own -= abs(node.mixed[i]) * log_own
        by_guest -= abs(node.mixed[i]) * log_guess
        if node.candidates[i] == token:
            own, others = log_own, log_guess
    _climb(learnt, node.cell, by_own + own)
    _climb(learnt, node.cell + 1, by_guest + others)


@borrowing
def _climb(learnt: Any, cell: int, gradient: float) -> None:
    learnt.trust_squares[cell] += gradient * gradient
    moved = learnt.trust[cell] + RATE * gradient / math.sqrt(learnt.trust_squares[cell])
    learnt.trust[cell] = min(max(moved, 0.0), MOST_TRUST)


@borrowing
def _leave(node: Any, side: int, chances: Any, left: float) -> None:
    """Share what a side leaves to others among candidates that it did not name, and the rest."""
    unnamed = 0
    for i in range(node.wide):
        unnamed += chances[i] == 0.0
    shared = UNNAMED * left if unnamed else 0.0
    node.floor[side] = max(shared / max(unnamed, 1), LEAST)
    node.rest[side] = max(left - shared, LEAST)


@borrowing
def _multiply(a: float, b: float, node: Any) -> None:
    whole = node.none = math.exp(a * math.log(node.rest[0]) + b * math.log(node.rest[1]))
    for i in range(node.wide):
        own, others = _log(node, 0, node.chance[i]), _log(node, 1, node.guess[i])
        node.mixed[i] = math.exp(a * own + b * others)
        whole += node.mixed[i]
    for i in range(node.wide):
        node.mixed[i] /= whole
    node.none /= whole


@borrowing
def _log(node: Any, side: int, chance: float) -> float:
    """Of a candidate's chance by one side: 0 if it did not name it, negative if in the tree."""
    return math.log(max(abs(chance), LEAST) if chance != 0.0 else node.floor[side])


@borrowing
def _place(node: Any, token: int) -> int:
    """Of a token among a node's candidates, entered behind the n-grams' own if need be."""
    n = node.wide
    for i in range(n):
        if node.candidates[i] == token:
            return i
    if n == ROOM:
        return NONE
    node.candidates[n] = token
    node.levels[n, :] = 0
    node.chance[n] = 0.0
    node.wide = n + 1
    return n


@borrowing
def _cell(best: float, depth: int) -> int:
    """Of the n-grams' exponent; the guest's is the next one."""
    level = 0 if depth == 0 else len(SURE) + 1
    for sure in SURE:
        level += best > sure
    return 2 * level
