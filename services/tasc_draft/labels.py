"""A set of labels as a trie of tokens, and the labels that each row of a batch is limited to.

The trie consists of flat arrays for compiled code. Node 0 is the root. Nodes are numbered level by
level, with siblings in the order of their tokens, so the children of node i are the nodes
``first[i]`` to ``first[i + 1] - 1``. A node with several children is a *branch*. The target has a
choice only at a branch. Between branches, each token is forced.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import borrowing, compiled
from tasc_draft.drafts import Int32, Int64, Tokens

NOWHERE = -1  # the state after a token that no label has
UNLIMITED = -2  # the state of a row that may emit any token
NO_BRANCH = -1


@dataclass(frozen=True)
class LabelTrie:
    """A trie of token sequences, each with its end-of-sequence token.

    Attributes:
        token: ``int32[nodes]`` the token that leads to a node.
        first: ``int32[nodes + 1]`` where each node's children begin.
        ahead: ``int32[nodes]`` number of forced tokens from a node to the next branch; 0 for a
            branch, `NO_BRANCH` if no branch follows.
        decides: ``int32[nodes]``, 1 if a token that is allowed at a node leads to a further branch,
            else 0. A draft from a node with 0 saves no forward.
    """

    token: Int32
    first: Int32
    ahead: Int32
    decides: Int32

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "LabelTrie":
        """The trie of sequences, which may come in any order and more than once."""
        texts = Tokens.of(sorted({tuple(s) for s in sequences}))
        size = len(texts.ids) + 1
        token, parent, depth = (np.zeros(size, np.int32) for _ in range(3))
        path = np.zeros(int(texts.lengths.max(initial=0)) + 1, np.int32)
        n = _build(texts.ids, texts.offsets, token, parent, depth, path)
        by_level = np.argsort(depth[:n], kind="stable")
        place = np.empty(n, np.int32)
        place[by_level] = np.arange(n, dtype=np.int32)
        above = place[parent[by_level[1:]]]
        first = (1 + np.searchsorted(above, np.arange(n + 1))).astype(np.int32)
        ahead, decides = np.zeros((2, n), np.int32)
        _look_ahead(first, ahead, decides)
        return cls(token[by_level], first, ahead, decides)

    def look(
        self,
        state: int,
        tokens: Int32,
        parents: Int32,
        kept: NDArray[np.bool_],
        masks: NDArray[np.uint32],
    ) -> None:
        """Fills ``kept`` and ``masks``: the allowed draft tokens, and the tokens allowed next.

        See `tasc_engine.guided.Guide.look`.
        """
        _look(self.token, self.first, state, tokens, parents, kept, masks)

    def after(self, state: int, tokens: Int32) -> int:
        """The state after ``tokens``; `NOWHERE` if no sequence continues with these tokens."""
        return int(_behind(self.token, self.first, state, tokens))

    def labels_at(self, text: Int32, starts: Int64, label: Int32) -> Int32:
        """The longest label that begins at each of some places of a text; -1 for none.

        Args:
            text: Tokens; every start is followed by a token that no label has.
            label: ``int32[nodes]``, the label that ends at a node; -1 for none.
        """
        found = np.full(len(starts), -1, np.int32)
        _find_labels(self.token, self.first, text, starts, label, found)
        return found

    def forced(self, state: int, max_tokens: int) -> Int32:
        """``int32[n]``, the forced tokens from a state on, at most ``max_tokens``."""
        found = np.empty(max_tokens, np.int32)
        return found[: _forced(self.token, self.first, state, found)]

    def forced_in(self, tokens: Int32) -> NDArray[np.bool_]:
        """``bool[n]``: whether each token of a path from the root is forced."""
        found = np.zeros(len(tokens), bool)
        _mark_forced(self.token, self.first, tokens, found)
        return found


class Forest(NamedTuple):
    """Several tries in the same arrays, for compiled code; see `LabelTrie` for the arrays."""

    token: Int32
    first: Int32
    ahead: Int32
    decides: Int32


class RowLabels:
    """The labels that each row is limited to. Rows with equal labels share one trie.

    A trie in use occupies one place of the forest and never moves. The size of a place is a power
    of two, so that free places can be reused.

    Attributes:
        forest: The tries in use; the content of free places is undefined. `start` may replace the
            forest by a larger one.
    """

    def __init__(self) -> None:
        self._of_row: dict[int, LabelTrie] = {}
        self._bases: dict[int, int] = {}  # by the trie's identity
        self._users: Counter[int] = Counter()
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # bases by size
        self._end = 0
        self.forest = Forest(*np.zeros((len(Forest._fields), 1), np.int32))

    def start(self, row: int, labels: LabelTrie | None) -> int:
        """Limit a row to some labels; None: no limit.

        Returns:
            The row's state in the forest: the root of its trie, or `UNLIMITED`.
        """
        self.finish(row)
        if labels is None:
            return UNLIMITED
        key = id(labels)
        if key not in self._bases:
            self._bases[key] = self._add(labels)
        self._of_row[row] = labels
        self._users[key] += 1
        return self._bases[key]

    def finish(self, row: int) -> None:
        labels = self._of_row.pop(row, None)
        if labels is None:
            return
        key = id(labels)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._free[_place_size(labels)].append(self._bases.pop(key))

    def _add(self, labels: LabelTrie) -> int:
        """Write a trie to a free place, and return where the place begins."""
        size = _place_size(labels)
        if self._free[size]:
            base = self._free[size].pop()
        else:
            base, self._end = self._end, self._end + size
        if self._end > len(self.forest.token):
            self.forest = _enlarged(self.forest, max(self._end, 2 * len(self.forest.token)))
        nodes = len(labels.token)
        self.forest.token[base : base + nodes] = labels.token
        self.forest.ahead[base : base + nodes] = labels.ahead
        self.forest.decides[base : base + nodes] = labels.decides
        np.add(labels.first, base, out=self.forest.first[base : base + nodes + 1])
        return base


def warm_up() -> None:
    """Compile or load compiled code, so that the first request does not wait for it."""
    trie, one = LabelTrie.of([[0]]), np.zeros(1, np.int32)
    trie.look(0, one, one - 1, np.zeros(1, bool), np.zeros((2, 1), np.uint32))
    trie.after(0, one)
    trie.forced(0, 1)


def _place_size(labels: LabelTrie) -> int:
    """Number of nodes of a trie plus one (``first`` is longer), rounded up to a power of two."""
    return 1 << len(labels.token).bit_length()


def _enlarged(forest: Forest, size: int) -> Forest:
    enlarged = Forest(*np.zeros((len(forest), size), np.int32))
    for array, before in zip(enlarged, forest, strict=True):
        array[: len(before)] = before
    return enlarged


@compiled
def _build(ids: Any, offsets: Any, token: Any, parent: Any, depth: Any, path: Any) -> int:
    """Fill the nodes of sorted sequences, ancestors first; returns the number of nodes.

    ``path`` is scratch memory.
    """
    n, before = 1, ids[:0]
    for i in range(len(offsets) - 1):
        now = ids[offsets[i] : offsets[i + 1]]
        shared = 0
        while shared < min(len(now), len(before)) and now[shared] == before[shared]:
            shared += 1
        for level in range(shared, len(now)):
            token[n], parent[n], depth[n] = now[level], path[level], level + 1
            path[level + 1] = n
            n += 1
        before = now
    return n


@borrowing
def _look_ahead(first: Any, ahead: Any, decides: Any) -> None:
    for state in range(len(ahead) - 1, -1, -1):
        children = first[state + 1] - first[state]
        ahead[state] = NO_BRANCH if children == 0 else 0
        if children == 1 and ahead[first[state]] != NO_BRANCH:
            ahead[state] = 1 + ahead[first[state]]
        elif children == 1:
            ahead[state] = NO_BRANCH
        for after in range(first[state], first[state + 1]):
            if ahead[after] != NO_BRANCH:
                decides[state] = 1


@borrowing
def child(token: Any, first: Any, state: int, wanted: int) -> int:
    """The state after a token; `NOWHERE` if no label continues with it."""
    low, high = first[state], first[state + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if token[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < end and token[low] == wanted else NOWHERE


@borrowing
def _fill(token: Any, first: Any, state: int, mask: Any) -> None:
    mask[:] = 0
    for after in range(first[state], first[state + 1]):
        mask[token[after] >> 5] |= np.uint32(1) << np.uint32(token[after] & 31)


@compiled
def _look(
    token: Any, first: Any, state: int, tokens: Any, parents: Any, kept: Any, masks: Any
) -> None:
    kept[:] = False
    if state < 0:
        masks[0] = 0
        return
    states = np.empty(len(tokens), np.int32)
    _fill(token, first, state, masks[0])
    for x in range(len(tokens)):
        above = parents[x]
        if above < 0 or kept[above]:
            states[x] = child(token, first, state if above < 0 else states[above], tokens[x])
            if states[x] >= 0:
                kept[x] = True
                _fill(token, first, states[x], masks[1 + x])


@borrowing
def _behind(token: Any, first: Any, state: int, tokens: Any) -> int:
    for i in range(len(tokens)):
        if state < 0:
            break
        state = child(token, first, state, tokens[i])
    return state


@compiled
def _find_labels(token: Any, first: Any, text: Any, starts: Any, label: Any, found: Any) -> None:
    for i in range(len(starts)):
        place = starts[i]
        state = child(token, first, 0, text[place])
        while state >= 0:
            if label[state] >= 0:
                found[i] = label[state]
            place += 1
            state = child(token, first, state, text[place])


@borrowing
def _forced(token: Any, first: Any, state: int, found: Any) -> int:
    n = 0
    while state >= 0 and n < len(found) and first[state + 1] - first[state] == 1:
        state = first[state]
        found[n] = token[state]
        n += 1
    return n


@borrowing
def _mark_forced(token: Any, first: Any, tokens: Any, found: Any) -> None:
    state = 0
    for i in range(len(tokens)):
        if state < 0:
            break
        found[i] = first[state + 1] - first[state] == 1
        state = child(token, first, state, tokens[i])
