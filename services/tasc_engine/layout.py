"""How the tokens of one step lie in the packed forward, and which of them see which.

All rows' tokens stand one behind the other, so that linear layers see no padding; only attention
pads, within groups of rows that bring few tokens. A row's draft is a tree: a node sees what its
parent sees, and itself (tree attention: Miao et al. 2024, arXiv 2305.09781). Nodes enter the cache
one behind the other; those that are kept move to where their depth says before the next step. It
holds index arithmetic, no model.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine import packing

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Rows that bring more tokens than this (prompts) attend alone, so that padding stays small.
MAX_GROUPED_TOKENS = 72


@dataclass(frozen=True)
class Feed:
    """What the rows of one step bring, as flat arrays.

    Attributes:
        rows: ``int32[n]`` cache rows, ascending.
        starts: ``int32[n]`` tokens each has in the cache already.
        tokens: ``int32[*]`` prompt tokens, or the current one, of all rows.
        offsets: ``int32[n + 1]`` where each row's tokens begin; each has at least one.
        draft_of: ``int32[n]`` place of the row's draft in ``drafts``; -1 when it may not emit yet.
        drafts: Trees behind the last token of each row that may emit.
        moves: ``int64[2, k]`` cache places to copy from and to before anything is written.
    """

    rows: Int32
    starts: Int32
    tokens: Int32
    offsets: Int32
    draft_of: Int32
    drafts: Drafts
    moves: Int64


def plain_feed(rows: list[int], start: int, tokens: Int32) -> Feed:
    """The same tokens for each of some rows, undrafted; each row emits."""
    n = len(rows)
    offsets = np.arange(n + 1, dtype=np.int32) * np.int32(len(tokens))
    return Feed(
        np.array(rows, np.int32), np.full(n, start, np.int32), np.tile(tokens, n), offsets,
        np.arange(n, dtype=np.int32), Drafts.empty(n), np.zeros((2, 0), np.int64),
    )  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Rows that attend in one call: the cache rows ``[begin, end)`` and ``S`` query places each.

    Attributes:
        kv_length: L, the cached places that any of them sees.
        gather: ``int64[R, S]`` index into the packed tokens; unused places repeat token 0.
        packed: ``int64[n]`` packed indices of the real tokens.
        padded: ``int64[n]`` where each of them stands in the flattened ``[R * S]`` places.
        sees: ``bool[R, S, L]``, true where a query sees a cached token.
        positions: ``int64[R, S + L]`` of the queries, then of the cached tokens, in their row.
        full: No place is unused, and the group has all tokens of the step in their order.
    """

    begin: int
    end: int
    kv_length: int
    gather: Tensor
    packed: Tensor
    padded: Tensor
    sees: Tensor
    positions: Tensor
    full: bool
    _biases: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def bias(self, shared: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """What is added to scores: 0 or minus infinity, ``[R, 1, shared * S, L]``; made once.

        Args:
            shared: Query heads that share a head of keys; they stand as more queries of it.
            window: Tokens a query looks back, itself included.
        """
        key = (shared, dtype, window)
        if key not in self._biases:
            sees, places = self.sees, self.gather.shape[1]
            if window is not None:
                queries, keys = self.positions[:, :places], self.positions[:, places:]
                sees = sees & (queries[:, :, None] - keys[:, None, :] < window)
            bias = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
            bias.masked_fill_(~sees, -torch.inf)
            self._biases[key] = bias.repeat(1, shared, 1)[:, None]
        return self._biases[key]


@dataclass(frozen=True)
class StepLayout:
    """The packed tokens of one step; N tokens, M of which the LM head looks at.

    Attributes:
        ids: ``int64[N]`` token ids.
        positions: ``int64[N]`` positions in their row.
        places: ``int64[N]`` where each enters the cache: row * length + place in the row.
        looked_at: ``int64[M]`` packed indices whose next token is wanted: of each row that may
            emit its last token, then its draft.
        moves: ``int64[2, k]``, see `Feed`.
    """

    ids: Tensor
    positions: Tensor
    places: Tensor
    looked_at: Tensor
    moves: Tensor
    groups: tuple[Group, ...]


def pack(feed: Feed, length: int, device: torch.device) -> StepLayout:
    """Lay out one step.

    Args:
        length: Places of a cache row.
    """
    step = packing.lay_out(feed, length)
    sizes = np.diff(step.begins)
    parts = [_group(members, feed, step) for members in _members(sizes)]
    # One copy to the device for all numbers, one for all masks.
    numbers = _sent([step.ids, step.positions, step.places, step.looked_at, feed.moves,
                     *(array for part in parts for array in part.numbers)], device)  # fmt: skip
    masks = _sent([part.sees for part in parts], device)
    groups = [_on_device(part, numbers[5 + 4 * i : 9 + 4 * i], masks[i], len(step.ids))
              for i, part in enumerate(parts)]  # fmt: skip
    ids, positions, places, looked_at, moves = numbers[:5]
    return StepLayout(ids, positions, places, looked_at, moves, tuple(groups))


def _members(sizes: Int64) -> list[Int64]:
    few = np.flatnonzero(sizes <= MAX_GROUPED_TOKENS)
    alone = [np.array([i]) for i in np.flatnonzero(sizes > MAX_GROUPED_TOKENS)]
    return [few, *alone] if len(few) else alone


def _group(members: Int64, feed: Feed, step: packing.Packed) -> packing.Padded:
    # A contiguous range of cache rows is a view; rows of the range that bring nothing ride along.
    begin, end = int(feed.rows[members[0]]), int(feed.rows[members[-1]]) + 1
    return packing.pad(members, begin, end, feed, step)


def _on_device(part: packing.Padded, numbers: list[Tensor], sees: Tensor, tokens: int) -> Group:
    gather, packed, padded, positions = numbers
    full = gather.numel() == len(packed) == tokens
    return Group(
        part.begin, part.end, part.kv_length, gather, packed, padded, sees, positions, full
    )  # fmt: skip


def _sent(arrays: list[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Arrays of one type on the device by one copy."""
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    tensor = torch.from_numpy(flat).to(device, non_blocking=True)
    parts = tensor.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
