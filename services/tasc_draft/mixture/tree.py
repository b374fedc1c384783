"""Best-first growth of the draft trees of all rows of a step, over one heap. Compiled.

The likeliest known path of the batch is drafted next, until the budget is spent or the next
token is not worth its cost. A chain is a tree whose nodes have one child. A node is expanded only
when its best child is likely to be drafted next, so leaves cost next to nothing.

The heap is bounded. Its first entry holds the size, in ``node``; entries count from 1.
"""

import math
from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import NEURAL
from tasc_draft.index import weights as cells
from tasc_draft.mixture import candidates as scoring
from tasc_draft.mixture import evidence, rules
from tasc_draft.mixture import external_tree as guests
from tasc_draft.mixture.candidates import MIXED, NONE, TASC
from tasc_draft.mixture.row_state import catch_up

# path: probability, or a bound of it; closed: the node has not been looked into yet
ENTRY = np.dtype([("path", np.float32), ("node", np.int32), ("closed", np.int32)])


def room(nodes: int) -> int:
    """Entries that trees of so many nodes need: each node closed, or with its next child."""
    return 2 * nodes + 1


@borrowing
def push(heap: Any, path: float, node: int, closed: bool) -> None:
    heap[0].node += 1
    i = heap[0].node
    while i > 1 and heap[i >> 1].path < path:
        _move(heap, i >> 1, i)
        i >>= 1
    heap[i].path = path
    heap[i].node = node
    heap[i].closed = closed


@borrowing
def pop(heap: Any) -> tuple[float, int, bool]:
    """Take the likeliest entry off; the heap must not be empty."""
    path, node, closed = heap[1].path, heap[1].node, heap[1].closed
    size = heap[0].node
    heap[0].node = size - 1
    moved, i, child = heap[size].path, 1, 2
    while child < size:
        if child + 1 < size and heap[child + 1].path > heap[child].path:
            child += 1
        if moved >= heap[child].path:
            break
        _move(heap, child, i)
        i = child
        child = 2 * i
    _move(heap, size, i)
    return path, node, closed != 0


@borrowing
def _move(heap: Any, source: int, target: int) -> None:
    heap[target].path = heap[source].path
    heap[target].node = heap[source].node
    heap[target].closed = heap[source].closed


@borrowing
def grow(state: Any, batch: Any, limits: Any, least: Any, guest: Any) -> int:
    """Draft for the rows of ``batch``; returns how many tokens were written to ``state.out``.

    Args:
        batch: ``int32[m]`` rows.
        limits: ``int32[m]`` most draft tokens of each; written on.
        least: ``float32[n]`` least path probability of the i-th token of all; n is the budget.
        guest: An `ExternalTree` whose trees of the same rows are mixed in. Rows where it drafted
            have as many tokens as ``limits`` allows, however unlikely: whoever asked the guest
            says what a token must bring.
    """
    nodes, heap, growth, is_eos = state.nodes, state.heap, state.growth[0], state.is_eos
    for line in range(len(batch)):
        if 0 <= batch[line] < len(state.rows) and state.rows[batch[line]].length > 0:
            take_in(state, batch[line])
            if guests.root(guest, line) == NONE or growth.most == 0:
                limits[line] = min(limits[line], growth.most)
        else:
            limits[line] = 0  # nobody is there
    roots = _plant(state, batch, limits, guest)
    n = roots
    while heap[0].node > 0 and n - roots < len(least):
        path, x, closed = pop(heap)
        most = nodes[x].path if closed else path
        line = nodes[x].line
        if limits[line] == 0 or most == 0.0 or most < least[n - roots]:
            continue
        if most < growth.min_prob and guests.root(guest, line) == NONE:
            continue
        if closed:
            look_into(state, x)
            if nodes[x].guest != NONE:
                guests.mix(state.learnt.trust, nodes[x], guest)
        else:
            _add(state, x, n, path, guest)
            limits[line] -= 1
            if not is_eos[nodes[n].token] and nodes[n].depth < growth.most:
                push(heap, growth.hope * path, n, True)
            n += 1
        if closed or growth.branching:
            _offer(nodes[x], x, heap, growth)
    return _write(nodes, roots, n, len(batch), state.out)


@borrowing
def take_in(state: Any, row: int) -> None:
    """Learn from the tokens a row took in, where its last tree led to them; then catch up."""
    it, nodes, rate = state.rows[row], state.nodes, state.growth[0].rate
    x, at = it.root, it.caught
    if x != NONE and nodes[x].row != row:
        x = NONE  # overwritten in a step that the row took no part in
    while x != NONE and at < it.length and nodes[x].wide > 0:
        token = state.texts[row, at]
        if rate > 0.0:
            scoring.learn(state.learnt.weights, state.learnt.squares, nodes[x], token, rate)
        if nodes[x].guest != NONE and (rate > 0.0 or state.growth[0].rule != MIXED):
            guests.learn(state.learnt, nodes[x], token)
        x = _child(nodes, x, token)
        at += 1
    it.root = NONE
    catch_up(state, row)


@borrowing
def _child(nodes: Any, x: int, token: int) -> int:
    child = nodes[x].first_child
    while child != NONE and nodes[child].token != token:
        child = nodes[child].sibling
    return child


@borrowing
def _plant(state: Any, batch: Any, limits: Any, guest: Any) -> int:
    """A root for each row that may draft; returns how many."""
    nodes, heap = state.nodes, state.heap
    heap[0].node = 0
    n = 0
    for line in range(len(batch)):
        if limits[line] > 0:
            evidence.root(state, n, batch[line])
            nodes[n].line = line
            nodes[n].width = nodes[n].wide = 0
            nodes[n].guest = guests.root(guest, line)
            nodes[n].first_child = NONE
            state.rows[batch[line]].root = n
            push(heap, 1.0, n, True)
            n += 1
    return n


@borrowing
def look_into(state: Any, x: int) -> None:
    """Give a node its candidates and their chances, by the rule."""
    rule = state.growth[0].rule
    if state.nodes[x].depth > 0:
        evidence.descend(state, x)
    if rule == MIXED:
        evidence.gather(state, x)
        scoring.score(state.learnt.weights, state.nodes[x])
    elif rule == TASC:
        rules.tasc(state, x)
    else:
        rules.trie(state, x)
    state.nodes[x].wide = state.nodes[x].width


@borrowing
def _offer(node: Any, x: int, heap: Any, growth: Any) -> None:
    """Put the likeliest candidate of a node that is not in the tree yet on the heap."""
    best, most = NONE, 0.0
    for i in range(node.wide):
        token, chance = node.candidates[i], guests.chance(node, i)
        if chance > most and token < growth.vocab_size and token != growth.sep:
            best, most = i, chance
    node.next = best
    if best != NONE:
        push(heap, node.path * most, x, False)


@borrowing
def _add(state: Any, x: int, n: int, path: float, guest: Any) -> None:
    """Make the candidate that node ``x`` offered its child ``n``."""
    parent, child = state.nodes[x], state.nodes[n]
    i = parent.next
    child.row = parent.row
    child.line = parent.line
    child.parent = x
    child.depth = parent.depth + 1
    child.token = parent.candidates[i]
    child.path = path
    child.width = child.wide = 0
    child.guest = guests.child(guest, parent.guest, child.token)
    child.first_child = NONE
    child.sibling = parent.first_child
    parent.first_child = n
    is_guests = guests.take(state.learnt.trust, parent, i)
    slot = cells.PROMPT if parent.levels[i, cells.PROMPT] else 0
    if state.growth[0].rule == MIXED:
        slot = scoring.loudest(state.learnt.weights, parent, i)
    child.source = NEURAL if is_guests else cells.SOURCE_OF_SLOT[slot]


@borrowing
def _write(nodes: Any, roots: int, n: int, lines: int, out: Any) -> int:
    """Write nodes ``[roots, n)`` row after row, parents in front of their children."""
    offsets = out.offsets
    offsets[: lines + 1] = 0
    for x in range(roots, n):
        behind = nodes[x].line + 1
        nodes[x].place = offsets[behind]
        offsets[behind] += 1
    for line in range(lines):
        offsets[line + 1] += offsets[line]
    for x in range(roots, n):
        node = nodes[x]
        at = offsets[node.line] + node.place
        out.tokens[at] = node.token
        out.parents[at] = nodes[node.parent].place if node.parent >= roots else NONE
        out.depths[at] = node.depth
        out.logp[at] = math.log(node.path)
        out.source[at] = node.source
    return n - roots
