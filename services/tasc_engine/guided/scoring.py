"""Scores labels: the probability of each label of a set as the answer to a prompt.

The labels are a trie of tokens. A forward verifies a draft tree, and a part of the trie is such a
tree. It follows the last token of the prompt, and its nodes are forwarded for the probabilities of
their children. By default, the likeliest prefixes are expanded first. The labels below a prefix
that is not expanded have at most its probability, which limits the share of unseen labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft.labels import LabelTrie
from tasc_engine.errors import GuideError
from tasc_engine.layout import Int32, Int64
from tasc_protocol import LabelScores, Scoring

Float64 = NDArray[np.float64]

_NONE = np.zeros(0, np.int32)
# Part of the tolerance that a forward leaves unseen; the rest is for what later forwards find.
_SLACK = 0.9
# Minimum share of all labels that the labels below a node probably have, so that the node is
# forwarded before its own probability is known. On one CPU core, 0.05 was slower, 0.5 as fast.
_LEAST_SHARE = 0.3


@dataclass(frozen=True)
class LabelSet:
    """Labels as a trie of their tokens, which includes their ends. Requests share it.

    Attributes:
        texts: The labels.
        trie: The trie.
        guesses: The trie for drafts, in which a node before an end is a branch, since it needs a
            forward here.
        label: ``int32[nodes]``, the label that ends at a node; -1 for none.
        parent, depth: ``int32[nodes]``, a node's parent (-1 for the root) and number of tokens.
    """

    texts: tuple[str, ...]
    trie: LabelTrie
    guesses: LabelTrie
    label: Int32
    parent: Int32
    depth: Int32

    @classmethod
    def of(cls, texts: Sequence[str], sequences: Sequence[Sequence[Sequence[int]]]) -> "LabelSet":
        """Compiles labels.

        Args:
            sequences: The token sequences of each label, which differ only in their last token.

        Raises:
            GuideError: Two labels have the same tokens.
        """
        owners = dict[tuple[int, ...], int]()
        for at, own in enumerate(sequences):
            for sequence in own:
                other = owners.setdefault(tuple(sequence), at)
                if other != at:
                    raise GuideError(
                        f"labels {other} ({texts[other]!r:.100}) and {at} ({texts[at]!r:.100}) "
                        "have the same tokens; leave one out"
                    )
        trie = LabelTrie.of(list(owners))
        others = [(*sequence[:-1], int(sequence[-1] == 0)) for sequence in owners]
        nodes = len(trie.token)
        parent = np.repeat(np.arange(nodes, dtype=np.int32), np.diff(trie.first))
        parent = np.concatenate((np.full(1, -1, np.int32), parent))
        depth, label = np.zeros(nodes, np.int32), np.full(nodes, -1, np.int32)
        _measure(parent, depth)
        for sequence, at in owners.items():
            label[trie.after(0, np.array(sequence, np.int32))] = at
        made = cls(tuple(texts), trie, LabelTrie.of([*owners, *others]), label, parent, depth)
        # Computed here, and not on the engine's thread.
        _ = made.stem, made.goes_on, made.ends_below, made.most_nested, made.outermost
        _ = made.preorder
        return made

    @cached_property
    def stem(self) -> int:
        """The node up to which all labels are equal. Its probability is the same for all labels."""
        node, first = 0, self.trie.first
        while first[node + 1] - first[node] == 1 and self.goes_on[first[node]]:
            if self.label[first[node]] >= 0:
                break
            node = int(first[node])
        return node

    def path(self, node: int) -> Int32:
        """``int32[depth]``, the tokens from the root to a node."""
        found = list[int]()
        while node > 0:
            found.append(int(self.trie.token[node]))
            node = int(self.parent[node])
        return np.array(found[::-1], np.int32)

    @cached_property
    def goes_on(self) -> NDArray[np.bool_]:
        """``bool[nodes]``, whether a node has children, so that it may need a forward."""
        return np.diff(self.trie.first) > 0

    @cached_property
    def ends_below(self) -> Int32:
        """``int32[nodes]``, the number of ends of labels at or below a node."""
        found = (self.label >= 0).astype(np.int32)
        _sum_up(self.parent, found)
        return found

    @cached_property
    def most_nested(self) -> Int32:
        """``int32[nodes]``, the maximum number of labels that end on one path below a node.

        Above 1 only if labels without an end are prefixes of other labels. All of them together
        have at most this number times the probability of the node.
        """
        found = np.zeros(len(self.label), np.int32)
        _nest(self.parent, self.label, found)
        return found

    @cached_property
    def outermost(self) -> NDArray[np.bool_]:
        """``bool[labels]``, whether no other label ends on the way to a label's ends."""
        found = np.ones(len(self.texts), bool)
        _mark_inner(self.parent, self.label, found)
        return found

    @cached_property
    def preorder(self) -> Int32:
        """``int32[*]``, the nodes with children, each before its descendants."""
        found = np.empty(len(self.label), np.int32)
        return found[: _walk(self.trie.first, found)].copy()

    @cached_property
    def deepest(self) -> int:
        """The number of tokens before the last one, in the longest label."""
        return int(self.depth.max()) - 1

    def slots(self, max_nodes: int) -> int:
        """Maximum number of tokens that a forward adds to a prompt.

        Args:
            max_nodes: Maximum number of nodes of a draft tree.
        """
        return self.deepest + min(max_nodes, len(self.preorder))


class LabelScorer:
    """Scores the labels for one prompt; owned by one sequence, used by one thread.

    In each forward, the tokens of `path` follow the prompt, and the tree of `grow` follows them.
    Then `read` takes the log-probabilities of the tokens that `wanted` lists.

    Args:
        max_nodes: Maximum number of nodes of a draft tree.

    Attributes:
        path: ``int32[*]``, the tokens between the prompt and the next tree.
        stem: The node before the first tree: the trie's, or the root if all mass is asked for.
        done: Whether no further forward is needed.
        error: The reason why scoring cannot go on; empty if it can.
        steps: Number of forwards so far.
    """

    def __init__(self, labels: LabelSet, how: Scoring, max_nodes: int) -> None:
        self.labels, self._how, self._max_nodes = labels, how, max_nodes
        self.stem = 0 if how.mass else labels.stem
        self.path, self.done, self.error, self.steps = labels.path(self.stem), False, "", 0
        self._base = self.stem  # the node before the tree
        self._next = 0  # the place in `preorder`
        self._tree = self._new = self._children = self._seeds = _NONE
        self._frontier = np.full(1, self.stem, np.int32)
        self._total, self._unseen = 0.0, 1.0
        self._nodes: _Nodes | None = None  # not while the request waits

    @property
    def slots(self) -> int:
        """Maximum number of tokens that a forward adds to the prompt."""
        return self.labels.slots(self._max_nodes)

    def grow(
        self, tokens: Int32, parents: Int32, logp: NDArray[np.float32]
    ) -> tuple[Int32, Int32, Int32]:
        """Makes the tree of the next forward.

        Args:
            tokens, parents, logp: A draft that follows `path`, as in `Drafts`, with the tokens that
                another model finds likely. Used by the first forward.

        Returns:
            ``int32[n]`` each: tokens, parents and depths, as in `Drafts`.
        """
        labels, trie, state = self.labels, self.labels.trie, self._state
        nodes, parents_of = np.empty((2, self._max_nodes), np.int32)
        if self._how.exact:
            n = _cover(
                labels.preorder[self._next :], labels.parent, state.expanded, self._base,
                state.place, nodes, parents_of,
            )  # fmt: skip
        else:
            seeds, guesses = self._seeds, state.logp[self._seeds]
            if not self.steps:
                seeds = _followed(trie.token, trie.first, self.stem, tokens, parents)
                guesses = logp[seeds >= 0].astype(np.float64)
                seeds = seeds[seeds >= 0]
            min_guess = np.log(_LEAST_SHARE) + self._total
            n = _grow(
                seeds, guesses, trie.first, labels.parent, labels.ends_below, state.logp,
                state.expanded, self._base, min_guess, state.place, nodes, parents_of,
            )  # fmt: skip
        self._tree = nodes[:n]
        depths = labels.depth[self._tree] - labels.depth[self._base]
        return trie.token[self._tree], parents_of[:n], depths

    def wanted(self, num_nodes: int) -> tuple[Int64, Int64]:
        """Returns the log-probabilities that `read` needs, ``int64[k]`` each: places and tokens.

        Args:
            num_nodes: Number of nodes that were forwarded: all nodes of the tree or, if these did
                not fit the memory, none. Later trees are then half as large.

        Returns:
            Places (0 is the token before the tree, 1 + x is node x), and tokens at these places.
        """
        if num_nodes < len(self._tree):
            self._max_nodes, self._tree = len(self._tree) // 2, _NONE
        first, nodes = self.labels.trie.first, np.append(np.int32(self._base), self._tree)
        places = np.flatnonzero(~self._state.expanded[nodes])
        self._new = new = nodes[places]
        counts = first[new + 1] - first[new]
        ends = np.cumsum(counts)
        self._children = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) + np.repeat(
            (first[new] - ends + counts).astype(np.int32), counts
        )
        return np.repeat(places, counts), self.labels.trie.token[self._children].astype(np.int64)

    def read(self, logprobs: Float64) -> None:
        """Takes the log-probabilities of a forward, and decides whether a further one is needed."""
        labels, how, state = self.labels, self._how, self._state
        if np.isnan(logprobs).any():
            self.error = "the target's logits are not numbers (NaN or infinite)"
            return
        self.steps += 1
        new = self._children
        # Not earlier, since a step that fails is run again.
        state.expanded[self._new] = True
        _add_up(labels.parent, new, logprobs, state.logp)
        ends = new[labels.label[new] >= 0]
        np.logaddexp.at(state.found, labels.label[ends], state.logp[ends])
        frontier = np.concatenate((self._frontier, new[labels.goes_on[new]]))
        self._frontier = frontier = frontier[~state.expanded[frontier]]
        # All labels below a node have at most its probability, or a multiple if they are nested.
        limits = state.logp[frontier] + np.log(labels.most_nested[frontier])
        found = state.found[state.found > -np.inf]
        self._total = float(np.logaddexp.reduce(np.concatenate((found, limits))))
        if self._total == -np.inf:
            self.error = "the target gives every label the probability 0"
            return
        # n numbers with the sum s have p-th powers with a sum of at most n^(1-p) s^p, if p <= 1
        # (Hölder), and of at most s^p, if p > 1.
        power = 1 / how.temperature
        limits = power * limits + max(1 - power, 0) * np.log(labels.ends_below[frontier])
        limits += state.most_bias[frontier]
        found = power * found + state.biases[state.found > -np.inf]
        top = max(found.max(initial=-np.inf), limits.max(initial=-np.inf))
        unseen, seen = np.exp(limits - top), float(np.exp(found - top).sum())
        total = seen + float(unseen.sum())
        self._unseen = float(unseen.sum()) / total
        if how.exact:
            order = labels.preorder
            while self._next < len(order) and state.expanded[order[self._next]]:
                self._next += 1
            self.done = self._next == len(order)
            if not self.done:
                self._move_to(int(order[self._next]))
            return
        self.done = seen > 0 and (self._unseen <= how.tolerance or self.steps >= how.max_steps)
        if not self.done:
            likeliest = np.argsort(-unseen, kind="stable")
            left = np.cumsum(unseen[likeliest][::-1])[::-1]  # unseen from each one on
            needed = max(np.count_nonzero(left > _SLACK * how.tolerance * total), 1)
            self._seeds = frontier[likeliest[:needed]]
            self._move_to(int(self._seeds[0]))

    @property
    def _state(self) -> "_Nodes":
        if self._nodes is None:
            self._nodes = _Nodes.of(self.labels, self.stem, self._how.biases)
        return self._nodes

    def answer(self, scores: LabelScores) -> str:
        """The likeliest label, or another answer if that is less probable than it must be."""
        sure = scores.probabilities[0] * (1 - scores.unseen) >= (self._how.abstain_below or 0)
        return scores.labels[0] if sure else self._how.abstain_label or ""

    def scores(self) -> LabelScores:
        """The labels that were scored so far."""
        found, texts, how = self._state.found, self.labels.texts, self._how
        scored = np.arange(len(found)) if how.exact else np.flatnonzero(found > -np.inf)
        scaled = found[scored] / how.temperature + self._state.biases[scored]
        order = scored[np.argsort(-scaled, kind="stable")][: how.top_k]
        mass = None
        if how.mass:  # an answer that begins with a longer label begins with a shorter one, too
            outer = scored[self.labels.outermost[scored]]
            mass = min(float(np.exp(np.logaddexp.reduce(found[outer]))), 1.0)  # rounding
        return LabelScores(
            labels=tuple(texts[at] for at in order),
            numbers=tuple(order.tolist()),
            logprobs=tuple(found[order].tolist()),
            total=float(np.logaddexp.reduce(scaled)),
            unseen=0.0 if how.exact else self._unseen,
            count=len(texts),
            temperature=how.temperature,
            biases=tuple(self._state.biases[order].tolist()) if how.biases else (),
            mass=mass,
        )

    def _move_to(self, node: int) -> None:
        """Sets `path` so that the next tree has room for the way to a node."""
        labels, depth = self.labels, self.labels.depth
        highest = max(depth[self.stem], depth[node] - self._max_nodes // 2)
        while depth[node] > highest:
            node = int(labels.parent[node])
        self._base, self.path = node, labels.path(node)


@dataclass(frozen=True)
class _Nodes:
    """The state of a trie's nodes for one prompt.

    Attributes:
        logp: ``float64[nodes]``, the log-probability of each prefix; NaN if it is unknown.
        expanded: ``bool[nodes]``, whether the children's are known.
        place: ``int32[nodes]``, scratch memory, -1 between uses.
        found: ``float64[labels]``, the log-probability of each label; -inf if it is unknown.
        biases: ``float64[labels]``, see `Scoring`.
        most_bias: ``float64[nodes]``, the greatest bias of a label at or below a node.
    """

    logp: Float64
    expanded: NDArray[np.bool_]
    place: Int32
    found: Float64
    biases: Float64
    most_bias: Float64

    @classmethod
    def of(cls, labels: LabelSet, stem: int, biases: Sequence[float]) -> "_Nodes":
        nodes = len(labels.label)
        logp, expanded = np.full(nodes, np.nan), np.zeros(nodes, bool)
        logp[stem] = 0.0
        expanded[:stem] = True  # the root, and the only node of each level
        found = np.full(len(labels.texts), -np.inf)
        own, most = np.zeros(len(labels.texts)), np.zeros(nodes)
        if biases:
            own = np.array(biases)
            _find_most(labels.parent, labels.label, own, most)
        return cls(logp, expanded, np.full(nodes, -1, np.int32), found, own, most)


def warm_up() -> None:
    """Compiles or loads the compiled code, so that the first request does not wait for it."""
    labels = LabelSet.of(["a", "b"], [[[0, 1, 2]], [[0, 2, 2]]])
    for exact in (False, True):
        how = Scoring(exact=exact, biases=(0.0, 0.0))
        scorer, no_logs = LabelScorer(labels, how, 1), np.zeros(0, np.float32)
        while not scorer.done:
            tokens, _, _ = scorer.grow(_NONE, _NONE, no_logs)
            _, wanted = scorer.wanted(len(tokens))
            scorer.read(np.full(len(wanted), -1.0))


@numba.njit(cache=True, nogil=True)
def _measure(parent: Any, depth: Any) -> None:
    for node in range(1, len(parent)):
        depth[node] = depth[parent[node]] + 1


@numba.njit(cache=True, nogil=True)
def _sum_up(parent: Any, counts: Any) -> None:
    for node in range(len(parent) - 1, 0, -1):
        counts[parent[node]] += counts[node]


@numba.njit(cache=True, nogil=True)
def _nest(parent: Any, label: Any, most: Any) -> None:
    for node in range(len(parent) - 1, 0, -1):
        own = most[node] + (1 if label[node] >= 0 else 0)
        most[parent[node]] = max(most[parent[node]], own)


@numba.njit(cache=True, nogil=True)
def _mark_inner(parent: Any, label: Any, outermost: Any) -> None:
    inside = np.zeros(len(parent), np.bool_)  # whether a label ends above a node
    for node in range(1, len(parent)):
        above = parent[node]
        inside[node] = inside[above] or label[above] >= 0
        if inside[node] and label[node] >= 0:
            outermost[label[node]] = False


@numba.njit(cache=True, nogil=True)
def _find_most(parent: Any, label: Any, biases: Any, most: Any) -> None:
    most[:] = -np.inf
    for node in range(len(parent) - 1, 0, -1):
        if label[node] >= 0:
            most[node] = max(most[node], biases[label[node]])
        most[parent[node]] = max(most[parent[node]], most[node])


@numba.njit(cache=True, nogil=True)
def _walk(first: Any, found: Any) -> int:
    """Writes the nodes with children in preorder; returns their number."""
    waiting, n = [0], 0
    while len(waiting):
        node = waiting.pop()
        found[n] = node
        n += 1
        for child in range(first[node + 1] - 1, first[node] - 1, -1):
            if first[child + 1] > first[child]:
                waiting.append(child)
    return n


@numba.njit(cache=True, nogil=True)
def _followed(token: Any, first: Any, stem: int, tokens: Any, parents: Any) -> Any:
    """The trie's node of each token of a draft; -1 for tokens that the trie does not have."""
    nodes = np.full(len(tokens), -1, np.int32)
    for x in range(len(tokens)):
        above = nodes[parents[x]] if parents[x] >= 0 else stem
        if above >= 0:
            for child in range(first[above], first[above + 1]):
                if token[child] == tokens[x] and first[child + 1] > first[child]:
                    nodes[x] = child
    return nodes


@numba.njit(cache=True, nogil=True)
def _enter(node: Any, parent: Any, base: Any, place: Any, nodes: Any, n: Any) -> int:
    """Adds a node and its missing ancestors to a tree of n nodes; returns the new number.

    Returns -1 if there is no room, or the node is not below ``base``.
    """
    above, missing = node, 0
    while above != base and above >= 0 and place[above] < 0:
        above, missing = parent[above], missing + 1
    if above < 0 or n + missing > len(nodes):
        return -1
    above, at = node, n + missing
    while above != base and place[above] < 0:
        at -= 1
        nodes[at], place[above] = above, at
        above = parent[above]
    return n + missing


@numba.njit(cache=True, nogil=True)
def _leave(parent: Any, place: Any, nodes: Any, parents: Any, n: int) -> None:
    """Writes the places of the parents of n nodes, and clears their own places."""
    for x in range(n):
        parents[x] = place[parent[nodes[x]]]
    for x in range(n):
        place[nodes[x]] = -1


@numba.njit(cache=True, nogil=True)
def _cover(
    order: Any, parent: Any, expanded: Any, base: int, place: Any, nodes: Any, parents: Any
) -> int:
    """Fills a tree with nodes in their order, and with their ancestors."""
    n = 0
    for node in order:
        if node != base and not expanded[node]:
            grown = _enter(node, parent, base, place, nodes, n)
            if grown < 0:
                break
            n = grown
    _leave(parent, place, nodes, parents, n)
    return n


@numba.njit(cache=True, nogil=True)
def _grow(
    seeds: Any, guesses: Any, first: Any, parent: Any, ends_below: Any, logp: Any, expanded: Any,
    base: int, min_guess: float, place: Any, nodes: Any, parents: Any,
) -> int:  # fmt: skip
    """Fills a tree with the likeliest nodes, and with their ancestors.

    The log-probability of a seed is its guess. Below a node, it is split by numbers of labels.
    """
    heap: Any = [(-logp[base], base)]
    n = 0
    for i in range(len(seeds)):
        if seeds[i] != base:
            heappush(heap, (-guesses[i], np.int64(seeds[i])))
    while len(heap) and n < len(nodes):
        price, node = heappop(heap)
        if node != base:
            grown = _enter(node, parent, base, place, nodes, n)
            if grown < 0:
                continue
            n = grown
        if expanded[node]:
            continue
        for child in range(first[node], first[node + 1]):
            if first[child + 1] > first[child]:
                guess = -price + np.log(ends_below[child] / ends_below[node])
                if guess >= min_guess or ends_below[child] == ends_below[node]:
                    heappush(heap, (-guess, np.int64(child)))
    _leave(parent, place, nodes, parents, n)
    return n


@numba.njit(cache=True, nogil=True)
def _add_up(parent: Any, children: Any, logprobs: Any, logp: Any) -> None:
    for i in range(len(children)):
        logp[children[i]] = logp[parent[children[i]]] + logprobs[i]
