"""The arithmetic of a step's layout, compiled over flat arrays. It knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tasc_engine.layout import Feed

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """See `StepLayout`; ``begins``: ``int64[n + 1]`` where each row's tokens begin."""

    ids: Int64
    positions: Int64
    places: Int64
    looked_at: Int64
    begins: Int64


@dataclass(frozen=True)
class Padded:
    """See `Group`; ``numbers`` are gather, packed, padded and positions."""

    begin: int
    end: int
    kv_length: int
    numbers: tuple[Int64, Int64, Int64, Int64]
    sees: NDArray[np.bool_]


def lay_out(feed: Feed, length: int) -> Packed:
    drafts = feed.drafts
    n = len(feed.tokens) + len(drafts.tokens)
    ids, positions, places = (np.empty(n, np.int64) for _ in range(3))
    looked_at = np.empty(len(drafts.tokens) + len(drafts.offsets) - 1, np.int64)
    begins = np.zeros(len(feed.rows) + 1, np.int64)
    _lay_out(
        feed.rows, feed.starts, feed.tokens, feed.offsets, feed.draft_of, drafts.tokens,
        drafts.depths, drafts.offsets, length, ids, positions, places, looked_at, begins,
    )  # fmt: skip
    return Packed(ids, positions, places, looked_at, begins)


def pad(members: Int64, begin: int, end: int, feed: Feed, step: Packed) -> Padded:
    sizes = np.diff(step.begins)[members]
    places, used = int(sizes.max()), int(sizes.sum())
    kv_length = int((feed.starts[members] + sizes).max())
    rows = end - begin
    gather = np.zeros((rows, places), np.int64)
    packed, padded = np.empty(used, np.int64), np.empty(used, np.int64)
    positions = np.zeros((rows, places + kv_length), np.int64)
    sees = np.zeros((rows, places, kv_length), np.bool_)
    _pad(
        members, begin, feed.rows, feed.starts, feed.offsets, feed.draft_of, feed.drafts.parents,
        feed.drafts.offsets, step.positions, step.begins, gather, packed, padded, positions, sees,
    )  # fmt: skip
    return Padded(begin, end, kv_length, (gather, packed, padded, positions), sees)


@numba.njit(cache=True, nogil=True)
def _lay_out(
    rows: Any, starts: Any, tokens: Any, token_offsets: Any, draft_of: Any, nodes: Any, depths: Any,
    offsets: Any, length: int, ids: Any, positions: Any, places: Any, looked_at: Any, begins: Any,
) -> None:  # fmt: skip
    n, m = 0, 0
    for i in range(len(rows)):
        at, first = starts[i], rows[i] * length
        for j in range(token_offsets[i], token_offsets[i + 1]):
            ids[n], positions[n], places[n] = tokens[j], at, first + at
            n, at = n + 1, at + 1
        if draft_of[i] >= 0:
            looked_at[m] = n - 1
            m += 1
            begin, end = offsets[draft_of[i]], offsets[draft_of[i] + 1]
            for x in range(begin, end):
                ids[n], positions[n] = nodes[x], at - 1 + depths[x]
                places[n] = first + at + x - begin
                looked_at[m] = n
                n, m = n + 1, m + 1
        begins[i + 1] = n


@numba.njit(cache=True, nogil=True)
def _pad(
    members: Any, begin: int, rows: Any, starts: Any, token_offsets: Any, draft_of: Any,
    parents: Any, offsets: Any, own: Any, begins: Any, gather: Any, packed: Any, padded: Any,
    positions: Any, sees: Any,
) -> None:  # fmt: skip
    # Attention over nothing is not a number, so unused places see the row's first place.
    sees[:, :, 0] = True
    width, n = gather.shape[1], 0
    for i in members:
        line, start, base = rows[i] - begin, starts[i], token_offsets[i + 1] - token_offsets[i]
        for k in range(start):
            positions[line, width + k] = k
        for s in range(begins[i + 1] - begins[i]):
            at = begins[i] + s
            gather[line, s], packed[n], padded[n] = at, at, line * width + s
            n += 1
            positions[line, s] = positions[line, width + start + s] = own[at]
            if s < base:
                sees[line, s, : start + s + 1] = True
            else:
                parent = parents[offsets[draft_of[i]] + s - base]
                sees[line, s] = sees[line, base + parent]  # -1 is the row's last token
                sees[line, s, start + s] = True
