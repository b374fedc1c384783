"""The corpus n-gram trie, laid out flat: build it from token ids, look at it. No files, no drafts.

Nodes are numbered level by level, within a level by parent, then by token; so the children of a
node are one contiguous run sorted by token. Node 0 is the root; a node of level d is an n-gram of
d tokens (Tsur et al. 2026, arXiv 2602.24174, section 5.2: the models M_n for n up to n_max).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft.drafts import Int32
from tasc_draft.errors import DraftError

ARRAYS = ("tokens", "counts", "first_child", "best_child")


@dataclass(frozen=True)
class CorpusIndex:
    """Immutable n-gram counts of a task's outputs, as a trie in flat arrays.

    Attributes:
        fingerprint: Fingerprint of the tokenizer that made the ids.
        vocab_size: The tokenizer's; it is also the id of the document mark SEP.
        n_max: Tokens of the longest n-gram.
        p_min: Least count of a kept n-gram.
        tokens: ``int32[nodes]`` last token of each node's n-gram; -1 for the root.
        counts: ``int32[nodes]`` how often the n-gram occurs; the root has all tokens.
        first_child: ``int32[nodes + 1]``; children of k are ``[first_child[k], first_child[k+1])``.
        best_child: ``int32[nodes]`` most frequent child, least token on ties, or -1. SEP is never
            the root's.
    """

    fingerprint: str
    vocab_size: int
    n_max: int
    p_min: int
    tokens: Int32
    counts: Int32
    first_child: Int32
    best_child: Int32

    def __post_init__(self) -> None:
        # Read-only like a mapped file, so that compiled code sees one array type for both.
        for name in ARRAYS:
            getattr(self, name).setflags(write=False)

    @property
    def nodes(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in ARRAYS)

    @classmethod
    def empty(cls, fingerprint: str, vocab_size: int) -> "CorpusIndex":
        """An index of no documents: every lookup misses."""
        return build_index(
            Documents.of([]), fingerprint=fingerprint, vocab_size=vocab_size, eos_id=0
        )

    def check_integrity(self) -> None:
        """Raise DraftError unless the arrays form a trie with consistent counts."""
        first, n = self.first_child, self.nodes
        ok = (
            n >= 1
            and all(len(a) == n for a in (self.counts, self.best_child))
            and len(first) == n + 1
            and first[0] == 1
            and first[n] == n
            and bool((np.diff(first) >= 0).all())
            and bool((first[:-1] > np.arange(n)).all())
            and bool((self.tokens[1:] >= 0).all() and (self.tokens[1:] <= self.vocab_size).all())
            and bool((self.tokens[first[1] :] < self.vocab_size).all())
            and bool((self.counts[1:] >= self.p_min).all())
            and self._children_are_sorted_and_fit()
        )
        if not ok:
            raise DraftError("the index arrays are inconsistent; build the index again")

    def _children_are_sorted_and_fit(self) -> bool:
        sizes = np.diff(self.first_child)
        parents = np.repeat(np.arange(self.nodes), sizes)
        same = parents[1:] == parents[:-1]
        sums = np.bincount(parents, self.counts[1:], self.nodes)
        best = _best_children(self.tokens, self.counts, self.first_child, self.vocab_size)
        return bool(
            (np.diff(self.tokens[1:])[same] > 0).all()
            and (sums <= self.counts).all()
            and (best == self.best_child).all()
        )


@dataclass(frozen=True)
class Documents:
    """Token ids of task outputs, without end-of-sequence, one document behind the other.

    Attributes:
        ids: ``int32[tokens]``.
        lengths: ``int64[documents]``, summing to the number of ids.
    """

    ids: Int32
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> "Documents":
        lengths = np.fromiter((len(d) for d in documents), np.int64, len(documents))
        ids = np.fromiter((t for d in documents for t in d), np.int32, int(lengths.sum()))
        return cls(ids, lengths)


def build_index(
    documents: Documents,
    *,
    fingerprint: str,
    vocab_size: int,
    eos_id: int,
    n_max: int = 6,
    p_min: int = 1,
) -> CorpusIndex:
    """Count every n-gram of ``SEP output EOS`` for each document, n up to ``n_max``.

    N-grams do not cross documents. Memory peaks at about 60 bytes a token.

    Args:
        eos_id: Written behind each document.
        p_min: N-grams that occur less often are left out (the paper's frequency threshold).

    Raises:
        DraftError: An id, or ``eos_id``, is outside the vocabulary, or there are too many n-grams.
    """
    text = _concatenate(documents, vocab_size, eos_id)
    levels = _levels(text, n_max, p_min)
    nodes = 1 + sum(len(level.tokens) for level in levels)
    if nodes > np.iinfo(np.int32).max:
        raise DraftError(
            f"{nodes} n-grams do not fit an index of 2^31; lower n_max ({n_max}) or raise p_min"
        )
    tokens = np.concatenate([[-1], *(level.tokens for level in levels)]).astype(np.int32)
    total = int((text > 0).sum())
    counts = np.concatenate([[total], *(level.counts for level in levels)]).astype(np.int32)
    first_child = _first_children(levels, len(tokens))
    return CorpusIndex(
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        n_max=n_max,
        p_min=p_min,
        tokens=tokens,
        counts=counts,
        first_child=first_child,
        best_child=_best_children(tokens, counts, first_child, vocab_size),
    )


@dataclass(frozen=True)
class _Level:
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    parents: NDArray[np.int64]  # node number within the level above


def _concatenate(documents: Documents, vocab_size: int, eos_id: int) -> NDArray[np.int64]:
    """``SEP output EOS`` of all documents, ids shifted by one, a 0 behind each document."""
    ids, lengths = documents.ids, documents.lengths
    if not 0 <= eos_id < vocab_size:
        raise DraftError(
            f"the end-of-sequence id is {eos_id}, the vocabulary has {vocab_size}; "
            "correct eos_token_id in the model's config.json"
        )
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DraftError(
            f"corpus ids run from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}; "
            "tokenise the corpus with the target's own tokenizer"
        )
    text = np.zeros(ids.size + 3 * lengths.size, np.int64)
    ends = np.cumsum(lengths + 3)
    text[ends - lengths - 3] = vocab_size + 1
    text[ends - 2] = eos_id + 1
    inside = np.arange(ids.size) + np.repeat(3 * np.arange(lengths.size) + 1, lengths)
    text[inside] = ids.astype(np.int64) + 1
    return text


def _suffix_order(text: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
    """Positions sorted by the next ``depth`` ids, by prefix doubling."""
    rank, known = text, 1
    while known < depth:
        behind = np.zeros_like(rank)
        behind[: max(rank.size - known, 0)] = rank[known:]
        pair = rank * (int(rank.max(initial=0)) + 1) + behind
        rank = np.unique(pair, return_inverse=True)[1]
        known *= 2
    return np.argsort(rank, kind="stable")


def _levels(text: NDArray[np.int64], n_max: int, p_min: int) -> list[_Level]:
    order = _suffix_order(text, n_max)
    padded = np.concatenate([text, np.zeros(n_max, np.int64)])
    group = np.zeros(order.size, np.int64)  # node above, for each position still in the trie
    levels: list[_Level] = []
    for depth in range(n_max):
        token = padded[order + depth]
        new = np.ones(order.size, bool)
        new[1:] = (group[1:] != group[:-1]) | (token[1:] != token[:-1])
        starts = np.flatnonzero(new)
        counts = np.diff(np.append(starts, order.size))
        kept = (counts >= p_min) & (token[starts] > 0)
        levels.append(_Level(token[starts][kept] - 1, counts[kept], group[starts][kept]))
        alive = np.repeat(kept, counts)
        number = np.cumsum(kept) - 1
        group = np.repeat(number, counts)[alive]
        order = order[alive]
    return levels


def _first_children(levels: list[_Level], nodes: int) -> Int32:
    sizes = np.zeros(nodes + 1, np.int64)
    above, begin = 0, 1
    for level in levels:
        np.add.at(sizes, above + level.parents + 1, 1)
        above, begin = begin, begin + len(level.tokens)
    return (np.cumsum(sizes) + 1).astype(np.int32)


def _best_children(tokens: Int32, counts: Int32, first_child: Int32, sep: int) -> Int32:
    nodes = len(tokens)
    best = np.full(nodes, -1, np.int32)
    children = np.arange(1, nodes)
    parents = np.repeat(np.arange(nodes), np.diff(first_child))
    allowed = ~((parents == 0) & (tokens[1:] == sep))
    children, parents = children[allowed], parents[allowed]
    order = np.lexsort((children, -counts[children].astype(np.int64), parents))
    parents, children = parents[order], children[order]
    leads = np.ones(parents.size, bool)
    leads[1:] = parents[1:] != parents[:-1]
    best[parents[leads]] = children[leads]
    return best
