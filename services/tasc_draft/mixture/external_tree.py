"""Mixes another proposer's draft trees with the n-grams' trees, over one heap.

If a node of the tree is also a node of the external tree, both sides' probabilities of the next
token v are mixed: p(v) = p_ngrams(v)^a * p_external(v)^b * exp(c(v)) / Z. Here c(v) is one number
for tokens that n-grams did not name, another for tokens that the external tree did not name, and a
third for all tokens that neither side named. The exponents a and b and these three numbers define
how far each side is trusted, for tokens that it names and for tokens that it leaves out. All five
numbers are learnt from the tokens that the target emits, like the weights of n-grams
(`evidence.learn`). Each number is the sum of a value for all nodes and a value for nodes of similar
depth and n-gram confidence. N-grams continue after tokens that only the external tree has, and vice
versa.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.drafts import Drafts, Int32
from tasc_draft.mixture.evidence import FULL_WIDTH, enter
from tasc_draft.mixture.row_state import NONE

SIDES = 2  # n-grams and external tree
# The five numbers before learning: exponents of n-grams and external tree, terms for tokens that
# n-grams and that the external tree did not name, and the term for tokens that neither named.
TRUST = (0.5, 0.5, 0.0, 0.0, 0.0)
OTHERS = len(TRUST) - 1
CONFIDENCE = (0.5, 0.9)  # limits between classes of the n-grams' largest probability
CELLS = 1 + 2 * (len(CONFIDENCE) + 1)  # the first cell is for all nodes
MAX_EXPONENT, MAX_ADDED = 2.0, 8.0  # limits of the numbers in each cell
RATE = 0.2
UNNAMED = 0.5  # share of a side's unnamed mass that goes to tokens named by the other side
MIN_PROB = 1e-5  # smaller probabilities count as this one


class ExternalTree(NamedTuple):
    """Drafts as trees: a root for each row of the step, then the nodes in the order of the drafts.

    Attributes:
        tokens: ``int32[rows + N]``.
        probs: ``float32[rows + N]``, probability of each token after its parent.
        first, sibling: ``int32[rows + N]`` first child and next sibling: nodes, or NONE.
        rows: ``int32[1]``, number of roots.
    """

    tokens: Int32
    probs: NDArray[np.float32]
    first: Int32
    sibling: Int32
    rows: Int32

    @classmethod
    def of(cls, drafts: Drafts) -> "ExternalTree":
        """The trees of drafts, which must have parents before their children."""
        tree = cls.empty(len(drafts.offsets) - 1, len(drafts.tokens))
        _link(drafts.tokens, drafts.parents, drafts.logp, drafts.offsets, tree)
        return tree

    @classmethod
    def empty(cls, rows: int = 0, tokens: int = 0) -> "ExternalTree":
        nodes = rows + tokens
        first, sibling = np.full((2, nodes), NONE, np.int32)
        ids, probs = np.zeros(nodes, np.int32), np.zeros(nodes, np.float32)
        return cls(ids, probs, first, sibling, np.full(1, rows, np.int32))


NO_TREE = ExternalTree.empty()


def initial_trust() -> NDArray[np.float32]:
    """``float32[CELLS, 5]``, before anything is learnt."""
    trust = np.zeros((CELLS, len(TRUST)), np.float32)
    trust[0] = TRUST
    return trust


@compiled
def _link(tokens: Any, parents: Any, logp: Any, offsets: Any, tree: Any) -> None:
    """Link nodes backwards, so that siblings are in the order of the drafts, likeliest first."""
    rows = tree.rows[0]
    for row in range(rows):
        begin = offsets[row]
        for x in range(offsets[row + 1] - 1, begin - 1, -1):
            deeper = parents[x] >= 0
            above = begin + parents[x]
            parent, node = rows + above if deeper else row, rows + x
            tree.tokens[node] = tokens[x]
            tree.probs[node] = min(math.exp(logp[x] - (logp[above] if deeper else 0.0)), 1.0)
            tree.sibling[node] = tree.first[parent]
            tree.first[parent] = node


@borrowing
def root(tree: Any, batch_row: int) -> int:
    """The external root of a row of the batch; NONE if it has no draft."""
    return batch_row if batch_row < tree.rows[0] and tree.first[batch_row] != NONE else NONE


@borrowing
def child(tree: Any, x: int, token: int) -> int:
    """The external child of node ``x`` with this token, if the child has children; else NONE."""
    if x == NONE:
        return NONE
    y = tree.first[x]
    while y != NONE and tree.tokens[y] != token:
        y = tree.sibling[y]
    return y if y != NONE and tree.first[y] != NONE else NONE


@borrowing
def mix(trust: Any, node: Any, tree: Any) -> None:
    """Add the external candidates to an expanded node and mix both sides' probabilities."""
    others, x = 1.0, tree.first[node.external]
    node.external_chance[: node.full_width] = 0.0
    while x != NONE:
        i = _candidate(node, tree.tokens[x])
        if i != NONE:
            node.external_chance[i] = tree.probs[x]
            others -= tree.probs[x]
        x = tree.sibling[x]
    if node.width == 0:  # n-grams have no evidence
        for i in range(node.full_width):
            node.mixed[i] = node.external_chance[i]
        return
    own, best = 1.0, 0.0
    for i in range(node.full_width):
        own -= node.chance[i]
        best = max(best, node.chance[i])
    node.cell = _cell(best, node.depth)
    _share_rest(node, 0, own)
    _share_rest(node, 1, others)
    whole = node.none = math.exp(_score(trust, node, NONE))
    for i in range(node.full_width):
        node.mixed[i] = math.exp(_score(trust, node, i))
        whole += node.mixed[i]
    for i in range(node.full_width):
        node.mixed[i] /= whole
    node.none /= whole


@borrowing
def chance(node: Any, i: int) -> float:
    """The probability of a node's candidate; negative or 0 once the candidate is in the tree."""
    return node.chance[i] if node.external == NONE else node.mixed[i]


@borrowing
def take(trust: Any, node: Any, i: int) -> bool:
    """Mark a candidate as in the tree; returns whether the external tree contributed more."""
    if node.external == NONE:
        node.chance[i] = -node.chance[i]
        return False
    node.mixed[i] = -node.mixed[i]
    if node.width == 0:
        return True
    own, external = _gain(trust, node, 0, i), _gain(trust, node, 1, i)
    node.chance[i] = -node.chance[i]
    return external > own


@borrowing
def learn(learnt: Any, node: Any, token: int) -> None:
    """One step of gradient ascent in the five numbers on the likelihood of ``token`` (AdaGrad)."""
    if node.width == 0:
        return
    emitted = NONE
    for i in range(node.full_width):
        if node.candidates[i] == token:
            emitted = i
    for k in range(OTHERS + 1):
        gradient = _feature(node, k, emitted) - node.none * _feature(node, k, NONE)
        for i in range(node.full_width):
            gradient -= abs(node.mixed[i]) * _feature(node, k, i)
        if k < SIDES and gradient < 0.0 and _trust(learnt.trust, node, k) == 0.0:
            continue  # the side already has no influence
        _climb(learnt, 0, k, gradient)
        _climb(learnt, node.cell, k, gradient)


@borrowing
def _climb(learnt: Any, cell: int, k: int, gradient: float) -> None:
    learnt.trust_squares[cell, k] += gradient * gradient
    moved = learnt.trust[cell, k] + RATE * gradient / math.sqrt(learnt.trust_squares[cell, k])
    bound = MAX_EXPONENT if k < SIDES else MAX_ADDED
    learnt.trust[cell, k] = min(max(moved, -bound), bound)


@borrowing
def _trust(trust: Any, node: Any, k: int) -> float:
    """The k-th of the five numbers at a node."""
    found = trust[0, k] + trust[node.cell, k]
    return max(found, 0.0) if k < SIDES else found


@borrowing
def _cell(best: float, depth: int) -> int:
    cell = 1 if depth == 0 else 2 + len(CONFIDENCE)
    for limit in CONFIDENCE:
        cell += best > limit
    return cell


@borrowing
def _score(trust: Any, node: Any, i: int) -> float:
    """The score of a node's candidate or, for NONE, of all other tokens."""
    found = 0.0
    for k in range(OTHERS + 1):
        found += _trust(trust, node, k) * _feature(node, k, i)
    return found


@borrowing
def _gain(trust: Any, node: Any, side: int, i: int) -> float:
    """How much a side adds to a candidate's score, compared with the score of other tokens."""
    over = _feature(node, side, i) - _feature(node, side, NONE)
    unnamed = _feature(node, SIDES + side, i)
    return _trust(trust, node, side) * over + _trust(trust, node, SIDES + side) * unnamed


@borrowing
def _feature(node: Any, k: int, i: int) -> float:
    """The factor of the k-th number in the score of a candidate or, for NONE, of other tokens."""
    if k == OTHERS:
        return 1.0 if i == NONE else 0.0
    if k >= SIDES:
        return 1.0 if i != NONE and not _named(node, k - SIDES, i) else 0.0
    if i == NONE:
        return math.log(node.rest[k])
    if not _named(node, k, i):
        return math.log(node.floor[k])
    return math.log(max(abs(node.chance[i]) if k == 0 else node.external_chance[i], MIN_PROB))


@borrowing
def _named(node: Any, side: int, i: int) -> bool:
    """Whether a side named a candidate. N-grams may name one with probability 0."""
    return i < node.width if side == 0 else node.external_chance[i] > 0.0


@borrowing
def _share_rest(node: Any, side: int, left: float) -> None:
    """Divide a side's unnamed mass among the candidates that it did not name and other tokens."""
    unnamed = 0
    for i in range(node.full_width):
        unnamed += not _named(node, side, i)
    shared = UNNAMED * left if unnamed else 0.0
    node.floor[side] = max(shared / max(unnamed, 1), MIN_PROB)
    node.rest[side] = max(left - shared, MIN_PROB)


@borrowing
def _candidate(node: Any, token: int) -> int:
    """Like `enter`, for all candidates; new ones come after the n-grams' candidates."""
    i = enter(node, token, node.full_width, FULL_WIDTH)
    if i == node.full_width:
        node.full_width = i + 1
    return i
