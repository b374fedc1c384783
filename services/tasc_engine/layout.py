"""How the tokens of one step lie in the packed forward, and which cache slots each of them sees.

All rows' tokens stand one behind the other: nothing is padded. A row holds neighbouring slots of
the cache; what it feeds anyway is its trunk, its draft a tree behind that. A node sees the trunk,
the nodes above it and itself (tree attention: Miao et al. 2024, arXiv 2305.09781). Nodes enter the
cache one behind the other; those that are kept move to where their depth says before the next step.
It holds index arithmetic, no tensors and no model.
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
    """What the rows of one step bring, as flat arrays.

    Attributes:
        firsts: ``int64[n]`` the cache slot of each row's first token.
        starts: ``int32[n]`` tokens each has in the cache already.
        tokens: ``int32[*]`` prompt tokens, or the current one, of all rows.
        offsets: ``int32[n + 1]`` where each row's tokens begin; each has at least one.
        draft_of: ``int32[n]`` place of the row's draft in ``drafts``; -1 when it may not emit yet.
        drafts: Trees behind the last token of each row that may emit.
        moves: ``int64[2, k]`` cache slots to copy from and to before anything is written.
        adapters: ``int32[n]`` the number of each row's adapter, 0 for none; None: none has one.
        scored: ``int32[n]`` how many of each row's tokens, from the first on, are looked at besides
            what is looked at anyway; None: none of any row.
        known: ``bool[M]`` of each row that may emit its last token, then its draft: whether the
            next token is known, so that it needs no logits; None: of none.
    """

    firsts: Int64
    starts: Int32
    tokens: Int32
    offsets: Int32
    draft_of: Int32
    drafts: Drafts
    moves: Int64
    adapters: Int32 | None = None
    scored: Int32 | None = None
    known: NDArray[np.bool_] | None = None


def plain_feed(firsts: list[int], start: int, tokens: Int32) -> Feed:
    """The same tokens for each of some rows, undrafted; each row emits."""
    n = len(firsts)
    offsets = np.arange(n + 1, dtype=np.int32) * np.int32(len(tokens))
    return Feed(
        firsts=np.array(firsts, np.int64),
        starts=np.full(n, start, np.int32),
        tokens=np.tile(tokens, n),
        offsets=offsets,
        draft_of=np.arange(n, dtype=np.int32),
        drafts=Drafts.empty(n),
        moves=np.zeros((2, 0), np.int64),
    )


@dataclass(frozen=True)
class StepLayout(Generic[Array]):
    """The packed tokens of one step: N tokens of R rows, M of which the LM head looks at.

    All are int64: arrays on the host, tensors on the device.

    Attributes:
        ids: ``[N]`` token ids.
        positions: ``[N]`` positions in their row.
        slots: ``[N]`` where each enters the cache.
        seen: ``[N]`` how many of the row's slots it sees, from the first on; its own too, unless
            it is a node.
        tree: ``[N]`` for a node the nodes that it sees, itself included: bit b is node b of its
            row. 0 for others.
        adapters: ``[N]`` the number of its row's adapter, 0 for none.
        looked_at: ``[M]`` packed indices whose next token is wanted: of each row that may emit its
            last token, then its draft, without those that are ``known``; behind them those of all
            rows that are scored.
        begins: ``[R + 1]`` where each row's tokens begin.
        firsts: ``[R]`` the cache slot of each row's first token.
        trunks: ``[R]`` tokens of each row before its draft; node b enters ``first + trunk + b``.
        nodes: ``[R]`` size of each row's draft, the last of its tokens.
        moves: ``[2, k]``, see `Feed`.
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


def lay_out(feed: Feed) -> StepLayout[Int64]:
    """Lay out one step."""
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
    return StepLayout(*of_tokens, looked_at, begins, feed.firsts, trunks, nodes, feed.moves)


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
