"""Layout of a step's tokens in the packed forward, and of the cache slots that each token sees.

The tokens of all rows are concatenated without padding. A row holds adjacent slots of the cache.
A row's tokens before its draft are its trunk. The draft is a tree after the trunk. A node sees the
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
class ForwardBatch:
    """The tokens of the rows of one step, as flat arrays.

    Attributes:
        kv_starts: ``int64[n]``, the cache slot of each row's first token.
        context_lens: ``int32[n]``, number of tokens of each row that are already in the cache.
        tokens: ``int32[*]``, prompt tokens, or the current token, of all rows.
        query_offsets: ``int32[n + 1]``, where each row's tokens begin; a row has at least one.
        draft_of: ``int32[n]``, index of each row's draft in ``drafts``; -1 if the row may not emit
            yet.
        drafts: Trees after the last token of each row that may emit.
        adapters: ``int32[n]``, adapter number of each row, 0 for no adapter; None if no row has an
            adapter.
        scored: ``int32[n]``, how many of each row's first tokens also get logits to score the
            prompt; None if no token does.
        known: ``bool[M]``, whether the token after a place is known, so that the place needs no
            logits. The places are the last token and the draft tokens of each row that may emit.
            None if no next token is known.
    """

    kv_starts: Int64
    context_lens: Int32
    tokens: Int32
    query_offsets: Int32
    draft_of: Int32
    drafts: Drafts
    adapters: Int32 | None = None
    scored: Int32 | None = None
    known: NDArray[np.bool_] | None = None


def plain_batch(kv_starts: list[int], start: int, tokens: Int32) -> ForwardBatch:
    """A step with the same tokens in each row, without drafts; each row emits."""
    n = len(kv_starts)
    return ForwardBatch(
        kv_starts=np.array(kv_starts, np.int64),
        context_lens=np.full(n, start, np.int32),
        tokens=np.tile(tokens, n),
        query_offsets=np.arange(n + 1, dtype=np.int32) * np.int32(len(tokens)),
        draft_of=np.arange(n, dtype=np.int32),
        drafts=Drafts.empty(n),
    )


def chains(ids: Int32) -> Drafts:
    """Makes a draft of each row of ``int32[rows, n]`` ids: a chain with probability 1."""
    rows, n = ids.shape
    depths = np.tile(np.arange(1, n + 1, dtype=np.int16), rows)
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(n)
    logp, source = np.zeros(rows * n, np.float32), np.zeros(rows * n, np.int8)
    return Drafts(ids.flatten(), depths.astype(np.int32) - 2, depths, offsets, logp, source)


@dataclass(frozen=True)
class StepLayout(Generic[Array]):
    """The packed tokens of one step: N tokens of R rows; M of them get logits.

    All fields are int64: arrays on the host, tensors on the device.

    Attributes:
        ids: ``[N]`` token ids.
        positions: ``[N]`` positions in their row.
        slots: ``[N]`` cache slots of the tokens.
        visible_lens: ``[N]`` how many of the row's first slots a token sees. They include the
            token's own slot, unless the token is a node.
        tree: ``[N]`` bit mask of the nodes that a node sees, including itself; bit b is node b of
            the row. 0 for tokens that are not nodes.
        adapters: ``[N]`` adapter number of the token's row, 0 for no adapter.
        logits_indices: ``[M]`` packed indices of the tokens whose next token is needed: for each
            row that may emit, its last trunk token, then its draft, without tokens whose next token
            is ``known``; then the scored tokens of all rows.
        query_offsets: ``[R + 1]`` where each row's tokens begin.
        kv_starts: ``[R]`` cache slot of each row's first token.
        trunks: ``[R]`` number of tokens of each row before its draft; node b enters slot ``kv_start
            + trunk + b``.
        nodes: ``[R]`` size of each row's draft, whose nodes are the row's last tokens.
        moves: ``[2, k]``, cache slots to copy from and to before anything is written.
    """

    ids: Array
    positions: Array
    slots: Array
    visible_lens: Array
    tree: Array
    adapters: Array
    logits_indices: Array
    query_offsets: Array
    kv_starts: Array
    trunks: Array
    nodes: Array
    moves: Array


def lay_out(batch: ForwardBatch, moves: Int64 | None = None) -> StepLayout[Int64]:
    """Computes the layout of one step; ``moves`` are the cache's pending moves, if any."""
    drafts, rows = batch.drafts, len(batch.kv_starts)
    n, m = len(batch.tokens) + len(drafts.tokens), len(drafts.tokens) + len(drafts.offsets) - 1
    ids, positions, slots, visible_lens, tree, adapters = np.empty((6, n), np.int64)
    own = np.zeros(rows, np.int32) if batch.adapters is None else batch.adapters
    logits_indices, query_offsets = np.empty(m, np.int64), np.zeros(rows + 1, np.int64)
    trunks, nodes = np.empty((2, rows), np.int64)
    _lay_out(
        batch.kv_starts, batch.context_lens, batch.tokens, batch.query_offsets, batch.draft_of,
        drafts.tokens, drafts.depths, drafts.parents, drafts.offsets, own, ids, positions, slots,
        visible_lens, tree, adapters, logits_indices, query_offsets, trunks, nodes,
    )  # fmt: skip
    if batch.known is not None:
        logits_indices = logits_indices[~batch.known]
    if batch.scored is not None:
        places = [np.arange(b, b + k) for b, k in zip(query_offsets, batch.scored, strict=False)]
        logits_indices = np.concatenate((logits_indices, *places))
    of_tokens = ids, positions, slots, visible_lens, tree, adapters
    moves = np.zeros((2, 0), np.int64) if moves is None else moves
    of_rows = query_offsets, batch.kv_starts, trunks, nodes
    return StepLayout(*of_tokens, logits_indices, *of_rows, moves)


@numba.njit(cache=True, nogil=True)
def _lay_out(
    kv_starts: Any, context_lens: Any, tokens: Any, token_offsets: Any, draft_of: Any, drafted: Any,
    depths: Any, parents: Any, offsets: Any, own: Any, ids: Any, positions: Any, slots: Any,
    visible_lens: Any, tree: Any, adapters: Any, logits_indices: Any, query_offsets: Any,
    trunks: Any, nodes: Any,
) -> None:  # fmt: skip
    n, m = 0, 0
    for i in range(len(kv_starts)):
        at, first = context_lens[i], kv_starts[i]
        for j in range(token_offsets[i], token_offsets[i + 1]):
            ids[n], positions[n], slots[n] = tokens[j], at, first + at
            visible_lens[n], tree[n] = at + 1, 0
            n, at = n + 1, at + 1
        trunks[i], nodes[i] = at, 0
        if draft_of[i] >= 0:
            logits_indices[m] = n - 1
            m += 1
            begin, end = offsets[draft_of[i]], offsets[draft_of[i] + 1]
            nodes[i] = end - begin
            for x in range(begin, end):
                b = x - begin
                ids[n], positions[n], slots[n] = drafted[x], at - 1 + depths[x], first + at + b
                visible_lens[n], tree[n] = at, np.int64(1) << b
                if parents[x] >= 0:
                    tree[n] |= tree[n - b + parents[x]]
                logits_indices[m] = n
                n, m = n + 1, m + 1
        adapters[query_offsets[i] : n] = own[i]
        query_offsets[i + 1] = n
