"""What evidence is worth: a softmax over a node's candidates, and how its weights are learnt.

score(v) = sum over the slots that speak of weight[base + level(v)]; p(v) = exp(score(v)) / Z, where
Z also holds a score for "none of the candidates". The weights maximise the likelihood of the tokens
that the target did emit (log-linear mixing of n-gram evidence), so path probabilities are
calibrated and no mixing constant is left to choose.
"""

import math
from typing import Any

from tasc_draft.compiled import borrowing
from tasc_draft.index.cells import SLOTS

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
