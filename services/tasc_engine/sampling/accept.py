"""Follows the target's tokens through the draft trees of a step, in one pass.

The target's token after a visited node is the token that plain decoding would have emitted. The
path continues while the node has this token as a child (speculative verification with deterministic
choice: Leviathan et al. 2023, arXiv 2211.17192; of trees: Miao et al. 2024, arXiv 2305.09781).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts
from tasc_engine.kernels.cpu.compiling import borrowing
from tasc_engine.layout import Int32, Int64
from tasc_engine.stats import Counts


class EmitLimits(NamedTuple):
    """Where each row's tokens end.

    Attributes:
        room: ``int32[rows]``, the maximum number of tokens that a row may emit, at least 1.
        ends: ``bool[rows]``, whether a row's answer ends after the first end-of-sequence token.
        is_eos: ``bool[vocab]``, whether an id is an end-of-sequence token.
    """

    room: Int32
    ends: NDArray[np.bool_]
    is_eos: NDArray[np.bool_]


class Accepted(NamedTuple):
    """The accepted path and the tokens of each row.

    Attributes:
        tokens: ``int32[rows, W]``; the first ``emitted`` tokens of a row are its accepted draft
            tokens and the bonus token.
        emitted: ``int32[rows]``, number of tokens; 0 only if the target chooses none.
        path: ``int32[rows, W]``; the first ``followed`` nodes of a row are its accepted nodes.
        followed: ``int32[rows]``, the number of accepted nodes.
    """

    tokens: Int32
    emitted: Int32
    path: Int32
    followed: Int32

    @classmethod
    def none(cls, drafts: Drafts) -> "Accepted":
        """Returns a result without accepted nodes, with room for the longest path."""
        rows, widest = len(drafts.offsets) - 1, int(drafts.sizes.max(initial=0)) + 1
        tokens, path = np.zeros((2, rows, widest), np.int32)
        emitted, followed = np.zeros((2, rows), np.int32)
        return cls(tokens, emitted, path, followed)


class Trees(NamedTuple):
    """The trees of `Drafts`, for compiled code."""

    tokens: Int32
    parents: Int32
    offsets: Int32

    @classmethod
    def of(cls, drafts: Drafts) -> "Trees":
        return cls(drafts.tokens, drafts.parents, drafts.offsets)


class DraftCounts(NamedTuple):
    """Counts of a step's draft tokens.

    The arrays do not count forced tokens, and positions skip forced tokens. A draft that reaches a
    position counts for the source of its most likely token at this position.

    Attributes:
        drafted: ``int64[sources, positions]``, draft tokens.
        reached: ``int64[sources, positions]``, drafts that reach a position.
        kept: ``int64[sources, positions]``, draft tokens that entered an answer.
        row_drafted, row_kept: ``int64[rows]``, draft tokens and kept draft tokens by row.
        forced: Number of forced tokens of drafts that entered an answer.
    """

    drafted: Counts
    reached: Counts
    kept: Counts
    row_drafted: Counts
    row_kept: Counts
    forced: int


def accept(target_tokens: Int64, drafts: Drafts, limits: EmitLimits) -> Accepted:
    """Follows the target's tokens through each row's tree.

    Args:
        target_tokens: ``int64[M]``, the target's token after each current and each draft token;
            below 0 if the logits contain NaN.
        drafts: The drafts of the same rows, in the same order.
    """
    found = Accepted.none(drafts)
    _accept(target_tokens, Trees.of(drafts), limits, found)
    return found


def moves(accepted: Accepted, kv_starts: Int64, next_slots: Int32) -> Int64:
    """Returns the cache slots of accepted nodes, from and to, ``int64[2, k]``.

    Args:
        kv_starts: ``int64[n]``, the cache slot of each row's first token; -1 for a row that ended.
        next_slots: ``int32[n]``, the number of each row's tokens, including the current token.
    """
    found = np.empty((2, accepted.path.size), np.int64)
    n = _moves(accepted, kv_starts, next_slots, found)
    return np.ascontiguousarray(found[:, :n])


def count(
    drafts: Drafts, accepted: Accepted, used: Int32, sources: int, positions: int
) -> DraftCounts:
    """Counts a step's draft tokens by source and position, and by row.

    Args:
        used: ``int32[rows]``, number of emitted tokens that entered the answer.
    """
    drafted, reached, kept = np.zeros((3, sources, max(positions, 1)), np.int64)
    row_drafted, row_kept = np.zeros((2, len(used)), np.int64)
    position = np.empty(len(drafts.tokens), np.int32)
    counts = DraftCounts(drafted, reached, kept, row_drafted, row_kept, 0)
    forced = _count(drafts.source, Trees.of(drafts), accepted, used, position, counts)
    return counts._replace(forced=forced)


def warm_up() -> None:
    """Compiles or loads the compiled code, so that the first request does not wait for it."""
    drafts, one = Drafts.empty(1), np.ones(1, np.int32)
    limits = EmitLimits(one, np.ones(1, bool), np.zeros(1, bool))
    found = accept(np.zeros(1, np.int64), drafts, limits)
    moves(found, np.zeros(1, np.int64), one)
    count(drafts, found, one, 1, 1)


@borrowing
def advance(trees: Any, limits: Any, i: int, node: int, token: int, found: Any) -> int:
    """Appends the target's token after a node to the i-th row; returns the accepted child.

    Args:
        node: The last accepted node; -1 for the root.
        token: The target's token; below 0 if the target chose none.
        found: The `Accepted` of all rows; written.

    Returns:
        The index of the accepted child; -1 if the row's tokens end.
    """
    n, k = found.emitted[i], found.followed[i]
    if token < 0:
        return -1
    found.tokens[i, n] = token
    found.emitted[i] = n + 1
    begin, end = trees.offsets[i], trees.offsets[i + 1]
    for x in range(begin + node + 1, end):
        if trees.parents[x] == node and trees.tokens[x] == token:
            found.path[i, k] = x - begin
            found.followed[i] = k + 1
            if (limits.ends[i] and limits.is_eos[token]) or n + 1 == limits.room[i]:
                return -1
            return x - begin
    return -1


@borrowing
def _accept(target_tokens: Any, trees: Any, limits: Any, found: Any) -> None:
    for i in range(len(found.emitted)):
        root, node = trees.offsets[i] + i, -1
        while True:
            token = target_tokens[root + 1 + node]
            node = advance(trees, limits, i, node, token, found)
            if node < 0:
                break


@borrowing
def _moves(accepted: Any, kv_starts: Any, next_slots: Any, found: Any) -> int:
    n = 0
    for i in range(len(kv_starts)):
        if kv_starts[i] >= 0:
            first = kv_starts[i] + next_slots[i]
            for k in range(accepted.followed[i]):
                if accepted.path[i, k] != k:
                    found[0, n], found[1, n] = first + accepted.path[i, k], first + k
                    n += 1
    return n


@borrowing
def _count(source: Any, trees: Any, accepted: Any, used: Any, position: Any, counts: Any) -> int:
    forced = 0
    for i in range(len(used)):
        deepest, begin = 0, trees.offsets[i]
        for x in range(begin, trees.offsets[i + 1]):
            parent = trees.parents[x]
            position[x] = position[begin + parent] if parent >= 0 else 0
            if source[x] < 0:
                continue
            position[x] += 1
            counts.drafted[source[x], position[x] - 1] += 1
            counts.row_drafted[i] += 1
            if position[x] > deepest:
                deepest = position[x]
                counts.reached[source[x], deepest - 1] += 1
        for k in range(min(accepted.followed[i], used[i])):
            x = begin + accepted.path[i, k]
            if source[x] < 0:
                forced += 1
            else:
                counts.kept[source[x], position[x] - 1] += 1
                counts.row_kept[i] += 1
    return forced
