"""The compiled side of the proposer: draft trees, learning from answers, and recent answers.

The draft trees of all rows of a step grow best-first over one heap. The likeliest known path of the
batch is drafted next, until the budget is used up or the next token is not worth its cost. A chain
is a tree whose nodes have one child. A node is expanded only when its best child is likely to be
drafted next, so leaves cost next to nothing.

A row that is limited to labels gets drafts only at branches, where a forward would be needed. A
token at a branch is drafted with the tokens that it forces, up to the next branch. At the last
branch, nothing is drafted: once the target has chosen there, the rest of the label is forced.

The heap is an array of fixed size. Its element 0 holds the number of entries, in ``node``; the
entries follow from element 1 on.

*Recent answers* are a bounded text of finished answers that all rows draft from, because the corpus
lacks these answers until the index is built again.
"""

import math
from typing import Any

import numpy as np

from tasc_draft.compiled import borrowing
from tasc_draft.drafts import NEURAL
from tasc_draft.index import weights as cells
from tasc_draft.labels import NO_BRANCH, NOWHERE, UNLIMITED, child
from tasc_draft.mixture import evidence, external_tree, rules
from tasc_draft.mixture.evidence import MIXED, TASC
from tasc_draft.mixture.row_state import (
    END,
    NONE,
    append,
    catch_up,
    forget,
    forget_neighbours,
)

# path: probability of the path to the node's next child; for a leaf, an estimate
ENTRY = np.dtype([("path", np.float32), ("node", np.int32), ("leaf", np.int32)])


def heap_size(nodes: int) -> int:
    """Number of entries for trees of ``nodes`` nodes.

    Each node may have two entries: itself as a leaf, and its next child.
    """
    return 2 * nodes + 1


@borrowing
def _push(heap: Any, path: float, node: int, leaf: bool) -> None:
    heap[0].node += 1
    i = heap[0].node
    while i > 1 and heap[i >> 1].path < path:
        _move(heap, i >> 1, i)
        i >>= 1
    heap[i].path = path
    heap[i].node = node
    heap[i].leaf = leaf


@borrowing
def _pop(heap: Any) -> tuple[float, int, bool]:
    """Remove the likeliest entry; the heap must not be empty."""
    path, node, leaf = heap[1].path, heap[1].node, heap[1].leaf
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
    return path, node, leaf != 0


@borrowing
def _move(heap: Any, source: int, target: int) -> None:
    heap[target].path = heap[source].path
    heap[target].node = heap[source].node
    heap[target].leaf = heap[source].leaf


@borrowing
def grow(state: Any, batch: Any, limits: Any, min_probs: Any, external: Any, labels: Any) -> int:
    """Draft for the rows of ``batch``; returns the number of tokens written to ``state.out``.

    Args:
        batch: ``int32[m]`` rows.
        limits: ``int32[m]``, maximum number of draft tokens of each row; overwritten.
        min_probs: ``float32[n]``, minimum path probability for the i-th token drafted in the step;
            n is the budget.
        external: An `ExternalTree` of the same rows. Rows with a draft in this tree ignore the
            settings' ``min_prob``; the caller encodes their limit in ``min_probs``.
        labels: The `Forest` of label tries; each row's ``label`` is a state in it.
    """
    nodes, heap, growth, is_eos = state.nodes, state.heap, state.growth[0], state.is_eos
    for i in range(len(batch)):
        if 0 <= batch[i] < len(state.rows) and state.rows[batch[i]].length > 0:
            take_in(state, batch[i], labels)
            label = state.rows[batch[i]].label
            if label == NOWHERE or (label != UNLIMITED and not labels.decides[label]):
                limits[i] = 0
            if external_tree.root(external, i) == NONE or growth.max_tokens == 0:
                limits[i] = min(limits[i], growth.max_tokens)
        else:
            limits[i] = 0  # the row is not in use
    roots = _add_roots(state, batch, limits, external)
    n = roots
    while heap[0].node > 0 and n - roots < len(min_probs):
        path, x, leaf = _pop(heap)
        bound = nodes[x].path if leaf else path
        i = nodes[x].batch_row
        if limits[i] == 0 or bound == 0.0 or bound < min_probs[n - roots]:
            continue
        if bound < growth.min_prob and external_tree.root(external, i) == NONE:
            continue
        if leaf:
            _expand(state, x, labels)
            if nodes[x].external != NONE:
                external_tree.mix(state.learnt.trust, nodes[x], external)
            _push_best_child(nodes[x], x, heap, growth, labels)
            continue
        limit, deepest = limits[i], growth.max_tokens
        end = _segment_end(nodes[x], path, limit, min_probs, n - roots, deepest, labels)
        if end == 0:
            _leave_out(nodes[x])
        else:
            begin, n = n, _add_segment(state, x, n, path, external, labels)
            limits[i] -= n - begin
            last = nodes[n - 1]
            goes_on = last.label == UNLIMITED or labels.decides[last.label] != 0
            if goes_on and not is_eos[last.token] and last.depth < growth.max_tokens:
                _push(heap, growth.child_chance * path, n - 1, True)
        if growth.branching or end == 0:
            _push_best_child(nodes[x], x, heap, growth, labels)
    return _write(nodes, roots, n, len(batch), state.out)


@borrowing
def _segment_end(
    node: Any, path: float, limit: int, min_probs: Any, drafted: int, deepest: int, labels: Any
) -> int:
    """Number of tokens to draft for a node's next candidate: the candidate and its forced tokens.

    Returns 0 if these tokens exceed a limit or are not worth their cost. A forced token costs extra
    only if the candidate is rejected. Otherwise, a later forward would compute the token anyway.
    """
    if node.label == UNLIMITED:
        return 1
    state = child(labels.token, labels.first, node.label, node.candidates[node.next])
    n = 1 + labels.ahead[state]
    if n > limit or node.depth + n > deepest or drafted + n > len(min_probs):
        return 0
    cost = min_probs[drafted]
    for i in range(drafted + 1, drafted + n):
        cost += (1.0 - path) * min_probs[i]
    return n if path >= cost else 0


@borrowing
def _leave_out(node: Any) -> None:
    """Mark the next candidate of a node as taken, without adding a node."""
    i = node.next
    node.chance[i] = -node.chance[i]
    if node.external != NONE:
        node.mixed[i] = -node.mixed[i]


@borrowing
def _add_segment(state: Any, x: int, n: int, path: float, external: Any, labels: Any) -> int:
    """Adds the next candidate of node ``x`` and its forced tokens; returns the number of nodes."""
    nodes = state.nodes
    _add(state, x, n, path, external, labels)
    label = nodes[n].label
    while label >= 0 and labels.first[label + 1] - labels.first[label] == 1:
        label = labels.first[label]
        evidence.descend(state, n)
        parent, only = nodes[n], nodes[n + 1]
        parent.forced, parent.first_child = 1, n + 1
        _make_child(parent, only, n, labels.token[label], path)
        only.label = label
        only.external = external_tree.child(external, parent.external, only.token)
        only.sibling = NONE
        only.source = parent.source
        n += 1
    return n + 1


@borrowing
def take_in(state: Any, row: int, labels: Any) -> None:
    """Learn from a row's new tokens as far as they follow the row's last tree; then `catch_up`."""
    row_state, nodes, rate = state.rows[row], state.nodes, state.growth[0].rate
    x, at = row_state.root, row_state.caught
    if x != NONE and nodes[x].row != row:
        x = NONE  # a step without this row has overwritten the tree
    while x != NONE and at < row_state.length and (nodes[x].full_width > 0 or nodes[x].forced):
        token = state.texts[row, at]
        if nodes[x].forced:
            x, at = _child(nodes, x, token), at + 1
            continue
        if rate > 0.0:
            evidence.learn(state.learnt.weights, state.learnt.squares, nodes[x], token, rate)
        if nodes[x].external != NONE and (rate > 0.0 or state.growth[0].rule != MIXED):
            external_tree.learn(state.learnt, nodes[x], token)
        x = _child(nodes, x, token)
        at += 1
    row_state.root = NONE
    if row_state.label_root != UNLIMITED:
        label = row_state.label if row_state.caught > row_state.begin else row_state.label_root
        for at in range(max(row_state.caught, row_state.begin + 1), row_state.length):
            if label != NOWHERE:
                label = child(labels.token, labels.first, label, state.texts[row, at])
        row_state.label = label
    catch_up(state, row)


@borrowing
def _child(nodes: Any, x: int, token: int) -> int:
    child = nodes[x].first_child
    while child != NONE and nodes[child].token != token:
        child = nodes[child].sibling
    return child


@borrowing
def _add_roots(state: Any, batch: Any, limits: Any, external: Any) -> int:
    """Add a root for each row that may draft; returns their number."""
    nodes, heap = state.nodes, state.heap
    heap[0].node = 0
    n = 0
    for i in range(len(batch)):
        if limits[i] > 0:
            evidence.root(state, n, batch[i])
            nodes[n].batch_row = i
            nodes[n].width = nodes[n].full_width = nodes[n].forced = 0
            nodes[n].external = external_tree.root(external, i)
            nodes[n].first_child = NONE
            state.rows[batch[i]].root = n
            _push(heap, 1.0, n, True)
            n += 1
    return n


@borrowing
def _expand(state: Any, x: int, labels: Any) -> None:
    """Fill a node's candidates and their probabilities, by the rule of the settings' mixture."""
    rule = state.growth[0].rule
    if state.nodes[x].depth > 0:
        evidence.descend(state, x)
    if rule == MIXED:
        evidence.gather(state, x, labels)
        evidence.score(state.learnt.weights, state.nodes[x])
    elif rule == TASC:
        rules.tasc(state, x)
    else:
        rules.trie(state, x)
    state.nodes[x].full_width = state.nodes[x].width


@borrowing
def _push_best_child(node: Any, x: int, heap: Any, growth: Any, labels: Any) -> None:
    """Push a node's likeliest candidate that is not in the tree yet and may be drafted."""
    best, likeliest = NONE, 0.0
    for i in range(node.full_width):
        token, chance = node.candidates[i], external_tree.chance(node, i)
        if chance > likeliest and token < growth.vocab_size and token != growth.sep:
            if node.label >= 0:
                after = child(labels.token, labels.first, node.label, token)
                if after == NOWHERE or labels.ahead[after] == NO_BRANCH:
                    continue
            best, likeliest = i, chance
    node.next = best
    if best != NONE:
        _push(heap, node.path * likeliest, x, False)


@borrowing
def _add(state: Any, x: int, n: int, path: float, external: Any, labels: Any) -> None:
    """Make the next candidate of node ``x`` its child ``n``."""
    parent, added = state.nodes[x], state.nodes[n]
    i = parent.next
    _make_child(parent, added, x, parent.candidates[i], path)
    added.label = parent.label
    if parent.label >= 0:
        added.label = child(labels.token, labels.first, parent.label, added.token)
    added.external = external_tree.child(external, parent.external, added.token)
    added.sibling = parent.first_child
    parent.first_child = n
    is_external = external_tree.take(state.learnt.trust, parent, i)
    slot = cells.PROMPT if parent.levels[i, cells.PROMPT] else 0
    if state.growth[0].rule == MIXED:
        slot = evidence.dominant_slot(state.learnt.weights, parent, i)
    added.source = NEURAL if is_external else cells.SOURCE_OF_SLOT[slot]


@borrowing
def _make_child(parent: Any, made: Any, x: int, token: int, path: float) -> None:
    made.row = parent.row
    made.batch_row = parent.batch_row
    made.parent = x
    made.depth = parent.depth + 1
    made.token = token
    made.path = path
    made.width = made.full_width = made.forced = 0
    made.first_child = NONE


@borrowing
def _write(nodes: Any, roots: int, n: int, rows: int, out: Any) -> int:
    """Write nodes ``[roots, n)`` row after row, parents before their children."""
    offsets = out.offsets
    offsets[: rows + 1] = 0
    for x in range(roots, n):
        after = nodes[x].batch_row + 1
        nodes[x].place = offsets[after]
        offsets[after] += 1
    for i in range(rows):
        offsets[i + 1] += offsets[i]
    for x in range(roots, n):
        node = nodes[x]
        at = offsets[node.batch_row] + node.place
        out.tokens[at] = node.token
        out.parents[at] = nodes[node.parent].place if node.parent >= roots else NONE
        out.depths[at] = node.depth
        out.logp[at] = math.log(node.path)
        out.source[at] = node.source
    return n - roots


@borrowing
def teach(state: Any, row: int, answer: Any, rate: float, labels: Any) -> None:
    """Learn from each token of an answer to the prompt that ``row`` was started with.

    Args:
        answer: ``int32[n]``, including its end-of-sequence.
    """
    row_state, text, learnt = state.rows[row], state.texts[row], state.learnt
    for token in answer:
        catch_up(state, row)
        evidence.root(state, 0, row)
        _expand(state, 0, labels)
        evidence.learn(learnt.weights, learnt.squares, state.nodes[0], token, rate)
        text[row_state.length] = token
        row_state.length += 1


@borrowing
def release(state: Any, row: int, labels: Any) -> None:
    """Release a row and add its answer to the recent answers."""
    take_in(state, row, labels)
    row_state = state.rows[row]
    _remember(state, state.texts[row, row_state.begin : row_state.length])
    forget(state.own, row, state.rows[row].caught)
    forget_neighbours(state, row)
    state.rows[row].length = 0


@borrowing
def remember_all(state: Any, texts: Any, offsets: Any) -> None:
    """Add answers to the recent answers.

    Args:
        texts: ``int32[n]``, the answers, each preceded by SEP.
        offsets: ``int64[m + 1]`` where each text begins.
    """
    for i in range(len(offsets) - 1):
        _remember(state, texts[offsets[i] : offsets[i + 1]])


@borrowing
def _remember(state: Any, text: Any) -> None:
    """Append ``SEP answer END`` to the recent answers.

    Does nothing if the answer is empty or takes more than half of their capacity.
    """
    growth, recent = state.growth[0], state.recent
    tokens, size = recent.tokens[0], len(text) + 1
    if size < 3 or size > len(tokens) // 2:
        return
    if growth.recent_end + size > len(tokens):
        growth.recent_end = _drop_older_half(recent, growth.recent_end)
    at = growth.recent_end
    for token in text:
        known = 0 <= token < len(state.canonical)
        append(recent, 0, at, token if known else growth.sep)  # an unknown id matches nothing
        at += 1
    tokens[at] = END
    growth.recent_end = at + 1


@borrowing
def _drop_older_half(recent: Any, length: int) -> int:
    """Move the newer half of the recent answers to the front; returns its length."""
    forget(recent, 0, length)
    tokens, at = recent.tokens[0], 0
    for i in range(length // 2, length):
        if tokens[i] == END:
            tokens[at] = END
        else:
            append(recent, 0, at, tokens[i])
        at += 1
    return at
