"""A node of the draft tree: candidates for the next token, their evidence and their probabilities.

A candidate's score is the sum of weight[base + level] over the slots that support it, and its
probability p(v) = exp(score(v)) / Z, where Z includes a score for "none of the candidates". The
weights maximise the likelihood of the tokens that the target emitted (log-linear mixing of n-gram
evidence), so path probabilities are calibrated and there is no mixing constant to choose.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import NGRAM_SOURCES
from tasc_draft.index.aligned import KINDS
from tasc_draft.index.lookup import COLUMNS, WIDEST
from tasc_draft.index.weights import CONTEXTS, SLOTS
from tasc_draft.mixture.contexts import COLUMNS as CONTEXT_COLUMNS
from tasc_draft.mixture.contexts import MOST
from tasc_draft.tokens import Int32

NEGLIGIBLE = 1e-2  # smaller gradients do not move the weights
HOPELESS = 9.0  # a score this far below the best has no chance, and costs no exponential


@borrowing
def score(weights: Any, node: Any) -> None:
    """Fill the chances of a node's candidates and of none of them; they sum to one."""
    n, other = node.width, weights[node.other]
    greatest = other
    node.chance[:n] = 0.0
    for slot in range(SLOTS):
        base = node.bases[slot]
        if base >= 0:
            for i in range(n):
                node.chance[i] += weights[base + node.levels[i, slot]]
    for i in range(n):
        greatest = max(greatest, node.chance[i])
    none = math.exp(other - greatest)
    whole = none
    for i in range(n):
        below = node.chance[i] - greatest
        node.chance[i] = math.exp(below) if below > -HOPELESS else 0.0
        whole += node.chance[i]
    for i in range(n):
        node.chance[i] /= whole
    node.other_chance = none / whole


@borrowing
def learn(weights: Any, squares: Any, node: Any, token: int, rate: float) -> None:
    """One step of gradient ascent on the likelihood of ``token`` behind this node (AdaGrad)."""
    missed = 1.0
    for i in range(node.width):
        hit = 0.0
        if node.candidates[i] == token:
            hit, missed = 1.0, 0.0
        gradient = hit - abs(node.chance[i])
        if abs(gradient) < NEGLIGIBLE:
            continue
        for slot in range(SLOTS):
            if node.bases[slot] >= 0:
                _climb(weights, squares, node.bases[slot] + node.levels[i, slot], gradient, rate)
    _climb(weights, squares, node.other, missed - node.other_chance, rate)


@borrowing
def _climb(weights: Any, squares: Any, cell: int, gradient: float, rate: float) -> None:
    squares[cell] += gradient * gradient
    weights[cell] += rate * gradient / math.sqrt(squares[cell])


@borrowing
def loudest(weights: Any, node: Any, i: int) -> int:
    """The slot that adds most to a candidate's score over the candidates it does not speak for."""
    best, most = 0, -math.inf
    for slot in range(SLOTS):
        base, level = node.bases[slot], node.levels[i, slot]
        if base >= 0 and level > 0:
            gain = weights[base + level] - weights[base]
            if gain > most:
                best, most = slot, gain
    return best


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
        ("num_contexts", np.int32), ("contexts", np.int32, (MOST, CONTEXT_COLUMNS)),
        ("num_known", np.int32, (CONTEXTS,)),
        ("known", np.int32, (CONTEXTS, WIDEST, CONTEXT_COLUMNS)),
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


MIXED, TASC, TRIE = 0, 1, 2

# Scalars of the compiled code; see `DraftSettings`. sep, depth, head: of the index; asked: whether
# a source is, by its number.
GROWTH = np.dtype(
    [
        ("rule", np.int32), ("n_max", np.int32), ("p_min", np.int32),
        ("corpus_weight", np.float64), ("prefix", np.int32), ("most", np.int32),
        ("branching", np.bool_),
        ("min_prob", np.float32), ("hope", np.float32), ("rate", np.float32),
        ("vocab_size", np.int32),
        ("sep", np.int32), ("depth", np.int32), ("head", np.int32), ("recent_end", np.int32),
        ("asked", np.int8, (len(NGRAM_SOURCES),)),
    ],
    align=True,
)  # fmt: skip

# Room for one node's look-ups.
SCRATCH = np.dtype(
    [
        ("found", np.int32, (WIDEST, COLUMNS)),
        ("sums", np.float32, (2, WIDTH)), ("keys", np.uint32, (KINDS,)),
    ],
    align=True,
)  # fmt: skip


class Words(NamedTuple):
    """``[rows, words]`` of the prompts: hash and last token of each word."""

    hashes: NDArray[np.uint32]
    lasts: Int32


class Learnt(NamedTuple):
    """``float32[CELLS]`` weights and the summed squares of their gradients (AdaGrad).

    Attributes:
        trust, trust_squares: ``float32[guests.CELLS, 5]``, the same beside a guest.
    """

    weights: NDArray[np.float32]
    squares: NDArray[np.float32]
    trust: NDArray[np.float32]
    trust_squares: NDArray[np.float32]


class Out(NamedTuple):
    """`Drafts`, as compiled code writes it."""

    tokens: Int32
    parents: Int32
    depths: NDArray[np.int16]
    offsets: Int32
    logp: NDArray[np.float32]
    source: NDArray[np.int8]
