"""Another proposer's tree as a guest in the n-grams' own: nodes of both, over one heap. Compiled.

Where a node of the tree is one of the guest's too, what both say of the next token v is mixed:
p(v) = p_ngrams(v)^a * p_guest(v)^b * exp(c(v)) / Z, where c(v) is one number for tokens that
n-grams did not name, one for those that the guest did not, and one for all that nobody named. The
five numbers say how far each of the two is trusted, in what it says and in what it leaves out. They
are learnt from the tokens that the target did emit, as the weights of n-grams are (`scoring`): what
holds at all nodes, and what nodes of a depth and of a sureness of the n-grams add to that. N-grams
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

SIDES = 2  # n-grams and guest
# Exponents of n-grams and guest; what is added for tokens they did not name; for all others.
TRUST = (0.5, 0.5, 0.0, 0.0, 0.0)
OTHERS = len(TRUST) - 1
SURE = (0.5, 0.9)  # where the n-grams' likeliest token has more, nodes have numbers of their own
CELLS = 1 + 2 * (len(SURE) + 1)  # the first is of all nodes
MOST_EXPONENT, MOST_ADDED = 2.0, 8.0  # of each cell's
RATE = 0.2
UNNAMED = 0.5  # of what somebody leaves to others: the share of what the other one names
LEAST = 1e-5  # probability


class ExternalTree(NamedTuple):
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


def first_trust() -> NDArray[np.float32]:
    """``float32[CELLS, 5]``, before anything is learnt."""
    trust = np.zeros((CELLS, len(TRUST)), np.float32)
    trust[0] = TRUST
    return trust


def guest_of(drafts: Drafts) -> ExternalTree:
    """The trees of drafts for some rows, which must be trees of ids."""
    guest = _guest(len(drafts.offsets) - 1, len(drafts.tokens))
    _link(drafts.tokens, drafts.parents, drafts.logp, drafts.offsets, guest)
    return guest


def _guest(rows: int, tokens: int) -> ExternalTree:
    nodes = rows + tokens
    first, sibling = np.full((2, nodes), NONE, np.int32)
    return ExternalTree(
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
        for i in range(node.wide):
            node.mixed[i] = node.guess[i]
        return
    own, best = 1.0, 0.0
    for i in range(node.wide):
        own -= node.chance[i]
        best = max(best, node.chance[i])
    node.cell = _cell(best, node.depth)
    _leave(node, 0, own)
    _leave(node, 1, others)
    whole = node.none = math.exp(_score(trust, node, NONE))
    for i in range(node.wide):
        node.mixed[i] = math.exp(_score(trust, node, i))
        whole += node.mixed[i]
    for i in range(node.wide):
        node.mixed[i] /= whole
    node.none /= whole


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
    if node.width == 0:
        return True
    by_own, by_guest = _gain(trust, node, 0, i), _gain(trust, node, 1, i)
    node.chance[i] = -node.chance[i]
    return by_guest > by_own


@borrowing
def learn(learnt: Any, node: Any, token: int) -> None:
    """One step of gradient ascent on the likelihood of ``token`` by the five numbers (AdaGrad)."""
    if node.width == 0:
        return
    said = NONE
    for i in range(node.wide):
        if node.candidates[i] == token:
            said = i
    for k in range(OTHERS + 1):
        gradient = _feature(node, k, said) - node.none * _feature(node, k, NONE)
        for i in range(node.wide):
            gradient -= abs(node.mixed[i]) * _feature(node, k, i)
        if k < SIDES and gradient < 0.0 and _trust(learnt.trust, node, k) == 0.0:
            continue  # it is not heard at all, and less is nothing
        _climb(learnt, 0, k, gradient)
        _climb(learnt, node.cell, k, gradient)


@borrowing
def _climb(learnt: Any, cell: int, k: int, gradient: float) -> None:
    learnt.trust_squares[cell, k] += gradient * gradient
    moved = learnt.trust[cell, k] + RATE * gradient / math.sqrt(learnt.trust_squares[cell, k])
    most = MOST_EXPONENT if k < SIDES else MOST_ADDED
    learnt.trust[cell, k] = min(max(moved, -most), most)


@borrowing
def _trust(trust: Any, node: Any, k: int) -> float:
    """The k-th number at a node."""
    found = trust[0, k] + trust[node.cell, k]
    return max(found, 0.0) if k < SIDES else found


@borrowing
def _cell(best: float, depth: int) -> int:
    cell = 1 if depth == 0 else 2 + len(SURE)
    for sure in SURE:
        cell += best > sure
    return cell


@borrowing
def _score(trust: Any, node: Any, i: int) -> float:
    """Of a node's candidate, or NONE for all other tokens."""
    found = 0.0
    for k in range(OTHERS + 1):
        found += _trust(trust, node, k) * _feature(node, k, i)
    return found


@borrowing
def _gain(trust: Any, node: Any, side: int, i: int) -> float:
    """What a side adds to a candidate's score, over what it adds to other tokens'."""
    over = _feature(node, side, i) - _feature(node, side, NONE)
    unnamed = _feature(node, SIDES + side, i)
    return _trust(trust, node, side) * over + _trust(trust, node, SIDES + side) * unnamed


@borrowing
def _feature(node: Any, k: int, i: int) -> float:
    """What the k-th number is multiplied by in the score of a candidate, or NONE."""
    if k == OTHERS:
        return 1.0 if i == NONE else 0.0
    if k >= SIDES:
        return 1.0 if i != NONE and not _named(node, k - SIDES, i) else 0.0
    if i == NONE:
        return math.log(node.rest[k])
    if not _named(node, k, i):
        return math.log(node.floor[k])
    return math.log(max(abs(node.chance[i]) if k == 0 else node.guess[i], LEAST))


@borrowing
def _named(node: Any, side: int, i: int) -> bool:
    """Whether a side named a candidate. N-grams may have found that one of theirs has no chance."""
    return i < node.width if side == 0 else node.guess[i] > 0.0


@borrowing
def _leave(node: Any, side: int, left: float) -> None:
    """Share what a side leaves to others among candidates that it did not name, and the rest."""
    unnamed = 0
    for i in range(node.wide):
        unnamed += not _named(node, side, i)
    shared = UNNAMED * left if unnamed else 0.0
    node.floor[side] = max(shared / max(unnamed, 1), LEAST)
    node.rest[side] = max(left - shared, LEAST)


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
