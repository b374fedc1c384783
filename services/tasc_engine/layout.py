"""Layout of a step's tokens in the packed forward, and of the cache slots that each sees.

The tokens of all rows are concatenated without padding. A row holds adjacent slots of the cache.
Its tokens without the draft are its trunk, and its draft is a tree after the trunk. A node sees the
trunk, the nodes above it and itself (tree attention: Miao et al. 2024, arXiv 2305.09781). Nodes
enter adjacent slots of the cache. Before the next step, accepted nodes move to the slots of their
depths. This module has only index arithmetic, without tensors or a model.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Array = TypeVar("Array")


@dataclass(frozen=True)
class Feed:
    """The tokens of the rows of one step, as flat arrays.

    Attributes:
        firsts: ``int64[n]``, the cache slot of each row's first token.
        starts: ``int32[n]``, number of tokens of each row in the cache already.
        tokens: ``int32[*]``, prompt tokens, or the current token, of all rows.
        offsets: ``int32[n + 1]``, where each row's tokens begin; each has at least one.
        draft_of: ``int32[n]``, index of the row's draft in ``drafts``; -1 if it may not emit yet.
        drafts: Trees after the last token of each row that may emit.
        adapters: ``int32[n]``, the number of each row's adapter, 0 for none; None if no row has
            one.
        scored: ``int32[n]``, number of each row's tokens, from the first on, that are also looked
            at to score the prompt; None if there are none.
        known: ``bool[M]``, for the last token and the draft of each row that may emit: whether the
            next token is known, so that no logits are needed; None if none is known.
    """

    firsts: Int64
    starts: Int32
    tokens: Int32
    offsets: Int32
    draft_of: Int32
    drafts: Drafts
    adapters: Int32 | None = None
    scored: Int32 | None = None
    known: NDArray[np.bool_] | None = None


def plain_feed(firsts: list[int], start: int, tokens: Int32) -> Feed:
    """A step with the same tokens in each row, without drafts; each row emits."""
    n = len(firsts)
    offsets = np.arange(n + 1, dtype=np.int32) * np.int32(len(tokens))
    return Feed(
        firsts=np.array(firsts, np.int64),
        starts=np.full(n, start, np.int32),
        tokens=np.tile(tokens, n),
        offsets=offsets,
        draft_of=np.arange(n, dtype=np.int32),
        drafts=Drafts.empty(n),
    )


@dataclass(frozen=True)
class StepLayout(Generic[Array]):
    """The packed tokens of one step: N tokens of R rows; the LM head looks at M of them.

    All are int64: arrays on the host, tensors on the device.

    Attributes:
        ids: ``[N]`` token ids.
        positions: ``[N]`` positions in their row.
        slots: ``[N]`` cache slots of the tokens.
        seen: ``[N]`` number of the row's slots that a token sees, from the first on. They include
            its own slot, unless it is a node.
        tree: ``[N]`` for a node, the nodes that it sees, itself included: bit b is node b of its
            row. 0 for other tokens.
        adapters: ``[N]`` number of the row's adapter, 0 for none.
        looked_at: ``[M]`` packed indices of the tokens whose next token is needed: for each row
            that may emit, its last token, then its draft, without those that are ``known``; then
            the scored tokens of all rows.
        begins: ``[R + 1]`` where each row's tokens begin.
        firsts: ``[R]`` cache slot of each row's first token.
        trunks: ``[R]`` number of tokens of each row before its draft; node b enters slot ``first +
            trunk + b``.
        nodes: ``[R]`` size of each row's draft, which is the end of its tokens.
        moves: ``[2, k]``, cache slots to copy from and to before anything is written.
    """

    ids: Array
    positions: Array
    slots: Array
    seen: Array
    tree: Array
    adapters: Array
    looked_at: Array
    begins: Array
    firsts: Array
    trunks: Array
    nodes: Array
    moves: Array


def lay_out(feed: Feed, moves: Int64 | None = None) -> StepLayout[Int64]:
    """Computes the layout of one step; ``moves`` are the cache's pending ones, or none."""
    drafts, rows = feed.drafts, len(feed.firsts)
    n, m = len(feed.tokens) + len(drafts.tokens), len(drafts.tokens) + len(drafts.offsets) - 1
    ids, positions, slots, seen, tree, adapters = np.empty((6, n), np.int64)
    own = np.zeros(rows, np.int32) if feed.adapters is None else feed.adapters
    looked_at, begins = np.empty(m, np.int64), np.zeros(rows + 1, np.int64)
    trunks, nodes = np.empty((2, rows), np.int64)
    _lay_out(
        feed.firsts, feed.starts, feed.tokens, feed.offsets, feed.draft_of, drafts.tokens,
        drafts.depths, drafts.parents, drafts.offsets, own, ids, positions, slots, seen, tree,
        adapters, looked_at, begins, trunks, nodes,
    )  # fmt: skip
    if feed.known is not None:
        looked_at = looked_at[~feed.known]
    if feed.scored is not None:
        places = [np.arange(b, b + k) for b, k in zip(begins, feed.scored, strict=False)]
        looked_at = np.concatenate((looked_at, *places))
    of_tokens = ids, positions, slots, seen, tree, adapters
    moves = np.zeros((2, 0), np.int64) if moves is None else moves
    return StepLayout(*of_tokens, looked_at, begins, feed.firsts, trunks, nodes, moves)


@numba.njit(cache=True, nogil=True)
def _lay_out(
    firsts: Any, starts: Any, tokens: Any, token_offsets: Any, draft_of: Any, drafted: Any,
    depths: Any, parents: Any, offsets: Any, own: Any, ids: Any, positions: Any, slots: Any,
    seen: Any, tree: Any, adapters: Any, looked_at: Any, begins: Any, trunks: Any, nodes: Any,
) -> None:  # fmt: skip
    n, m = 0, 0
    for i in range(len(firsts)):
        at, first = starts[i], firsts[i]
        for j in range(token_offsets[i], token_offsets[i + 1]):
            ids[n], positions[n], slots[n] = tokens[j], at, first + at
            seen[n], tree[n] = at + 1, 0
            n, at = n + 1, at + 1
        trunks[i], nodes[i] = at, 0
        if draft_of[i] >= 0:
            looked_at[m] = n - 1
            m += 1
            begin, end = offsets[draft_of[i]], offsets[draft_of[i] + 1]
            nodes[i] = end - begin
            for x in range(begin, end):
                b = x - begin
                ids[n], positions[n], slots[n] = drafted[x], at - 1 + depths[x], first + at + b
                seen[n], tree[n] = at, np.int64(1) << b
                if parents[x] >= 0:
                    tree[n] |= tree[n - b + parents[x]]
                looked_at[m] = n
                n, m = n + 1, m + 1
        adapters[begins[i] : n] = own[i]
        begins[i + 1] = n
