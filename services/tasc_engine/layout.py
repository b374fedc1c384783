"""How the tokens of one step lie in the packed forward, and which of them see which.

All rows' tokens stand one behind the other, so that linear layers see no padding; only attention
pads, within groups of rows that bring few tokens. It holds index arithmetic, no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64 = NDArray[np.int64]

# Rows that bring more tokens than this (prompts) attend alone, so that padding stays small.
MAX_GROUPED_TOKENS = 48


@dataclass(frozen=True)
class Group:
    """Rows that attend in one call: the cache rows ``[begin, end)`` and ``S`` query places each.

    Attributes:
        gather: ``[R, S]`` index into the packed tokens; unused places repeat token 0.
        packed: ``[n]`` packed indices of the real tokens.
        padded: ``[n]`` where each of them stands in the flattened ``[R * S]`` places.
        mask: ``bool[R, 1, S, kv_length]``, true where a query sees a cached token.
    """

    begin: int
    end: int
    kv_length: int
    gather: Tensor
    packed: Tensor
    padded: Tensor
    mask: Tensor


@dataclass(frozen=True)
class StepLayout:
    """The packed tokens of one step; N tokens, M of which the LM head looks at.

    Attributes:
        ids: ``int64[1, N]`` token ids.
        positions: ``int64[1, N]`` positions in their row; also where they enter the cache.
        rows: ``int64[N]`` cache row of each token.
        looked_at: ``int64[M]`` packed indices whose next token is wanted.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    looked_at: Tensor
    groups: tuple[Group, ...]


def pack(
    rows: Sequence[int],
    starts: Sequence[int],
    tokens: Sequence[NDArray[np.int32]],
    looked_at: Sequence[int],
    device: torch.device,
) -> StepLayout:
    """Lay out one step.

    Args:
        rows: Cache row of each taking part, ascending.
        starts: Tokens each row has in the cache already.
        tokens: Ids each row brings, at least one.
        looked_at: How many of each row's last tokens the LM head looks at.
    """
    sizes = np.array([len(t) for t in tokens], np.int64)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    positions = np.arange(ends[-1]) + np.repeat(np.array(starts, np.int64) - begins, sizes)
    wanted = np.array(looked_at, np.int64)
    first = np.repeat(ends - np.cumsum(wanted), wanted)
    return StepLayout(
        ids=_tensor(np.concatenate(tokens).astype(np.int64)[None], device),
        positions=_tensor(positions[None], device),
        rows=_tensor(np.repeat(np.array(rows, np.int64), sizes), device),
        looked_at=_tensor(np.arange(wanted.sum()) + first, device),
        groups=tuple(
            _group(np.array(members), rows, sizes, begins, positions, device)
            for members in _members(sizes)
        ),
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _members(sizes: Int64) -> list[list[int]]:
    few = [i for i, size in enumerate(sizes) if size <= MAX_GROUPED_TOKENS]
    alone = [[i] for i, size in enumerate(sizes) if size > MAX_GROUPED_TOKENS]
    return [few, *alone] if few else alone


def _group(
    members: Int64,
    rows: Sequence[int],
    sizes: Int64,
    begins: Int64,
    positions: Int64,
    device: torch.device,
) -> Group:
    # A contiguous range of cache rows is a view; rows of the range that bring nothing ride along.
    begin, end = rows[members[0]], rows[members[-1]] + 1
    longest = int(sizes[members].max())
    within = np.concatenate([np.arange(sizes[m]) for m in members])
    line = np.repeat([rows[m] - begin for m in members], sizes[members])
    packed = within + np.repeat(begins[members], sizes[members])
    gather = np.zeros((end - begin, longest), np.int64)
    gather[line, within] = packed
    sees = np.zeros((end - begin, longest), np.int64)
    sees[line, within] = positions[packed]
    kv_length = int(sees.max()) + 1
    mask = np.arange(kv_length) <= sees[:, None, :, None]
    return Group(
        begin,
        end,
        kv_length,
        _tensor(gather, device),
        _tensor(packed, device),
        _tensor(line * longest + within, device),
        _tensor(mask, device),
    )
