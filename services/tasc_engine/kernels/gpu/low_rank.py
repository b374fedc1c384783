"""Additions of low-rank adapters to linear layers, as Triton kernels that read what a step uses.

One kernel groups a step's tokens by adapter. Then each program of a product handles a few tokens of
one adapter and reads the weights of that adapter only (Punica: Chen et al. 2023, arXiv 2310.18547;
S-LoRA: Sheng et al. 2023, arXiv 2311.03285). Programs that have no tokens end at once. A layer has
two products. The first one cuts a layer's inputs into parts, and the second one adds the parts in
their order. The parts depend on the layer alone, so a token's result does not depend on other
tokens. Grids depend on shapes only, so captured calls serve every step of the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasc_engine.kernels.gpu.compiling import REGISTERS, jit, power

try:
    import triton.language as tl
except ImportError:
    tl = None

# For each adapter and part: ``down`` [r, in] and ``up`` [out, r], or None without an addition.
Pairs = Sequence[Sequence[tuple[Tensor, Tensor] | None]]

_LINES = 16  # tokens of a program; matrix units need as many
_SHARE = 512  # inputs of a program of the first product
_COLUMNS = 128  # outputs of a program of the second product
_SCANNED = 1024  # tokens that a program looks at together when it groups them
_EVEN = 16  # elements; offsets of weights are multiples of it, so that loads are wide


@dataclass(frozen=True)
class Groups:
    """The tokens of a step by adapter.

    Attributes:
        members: ``int32[adapters, N]``, the indices of each adapter's tokens, in order.
        counts: ``int32[adapters]``, number of tokens of each adapter.
    """

    members: Tensor
    counts: Tensor


@dataclass(frozen=True)
class GroupedLayer:
    """All adapters' weights of a linear layer, or of joined layers (its parts).

    Attributes:
        down: For each adapter and part ``[rank, inputs]``, flat.
        up: For each adapter and part ``[rank, outputs of the part]``, flat; the number of outputs
            is rounded up to a multiple of 16.
        plan: ``int64[adapters, parts, 3]``, offsets in ``down`` and in ``up``, and rank; rank 0 if
            the adapter does not change the part.
        begins: ``int32[parts + 1]``, the first output of each part, and the end.
        inputs, outputs: Numbers of inputs and of outputs of all parts.
        widest: Maximum number of outputs of a part.
        rank: Maximum rank of an adapter in a part.
        even: A power of two, at most 16, that divides the first output of each part.
    """

    down: Tensor
    up: Tensor
    plan: Tensor
    begins: Tensor
    inputs: int
    outputs: int
    widest: int
    rank: int
    even: int


def group(numbers: Tensor, adapters: int) -> Groups:
    """Groups tokens by their adapter number, ``int64[N]``; tokens with number 0 are left out."""
    members = numbers.new_empty((adapters, len(numbers)), dtype=torch.int32)
    counts = numbers.new_empty(adapters, dtype=torch.int32)
    _group[(adapters,)](numbers, members, counts, len(numbers), block=_SCANNED, num_warps=4)
    return Groups(members, counts)


def lay_out(pairs: Pairs, widths: Sequence[int]) -> GroupedLayer:
    """Lays out the weights of a layer, of one dtype and device; at least one must be there.

    Args:
        pairs: The weights; ``up`` contains the scale.
        widths: Number of outputs of each part.
    """
    given = [pair for own in pairs for pair in own if pair]
    like, begins = given[0][0], np.cumsum([0, *widths])
    plan = np.zeros((len(pairs), len(widths), 3), np.int64)
    downs, ups, ends = list[Tensor](), list[Tensor](), [0, 0]
    for number, own in enumerate(pairs):
        for part, pair in enumerate(own):
            if pair:
                down, up = pair
                plan[number, part] = (*ends, len(down))
                downs.append(_padded(down.reshape(1, -1)).flatten())
                ups.append(_padded(up.T).flatten())
                ends = [ends[0] + len(downs[-1]), ends[1] + len(ups[-1])]
    return GroupedLayer(
        torch.cat(downs), torch.cat(ups), torch.from_numpy(plan).to(like.device),
        torch.from_numpy(begins.astype(np.int32)).to(like.device), like.shape[1], sum(widths),
        max(widths), int(plan[..., 2].max()), int(np.gcd.reduce([_EVEN, *begins])),
    )  # fmt: skip


def _padded(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % _EVEN))


def add(groups: Groups, layer: GroupedLayer, x: Tensor, y: Tensor) -> None:
    """Adds the adapters' results to ``y``.

    Sums are computed in float32 and rounded once.

    Args:
        x: ``[..., inputs]`` of N tokens.
        y: ``[..., outputs]`` of the same tokens, contiguous.
    """
    x, y = x.reshape(-1, layer.inputs).contiguous(), y.view(-1, layer.outputs)
    adapters, tokens = groups.members.shape
    parts = layer.plan.shape[1]
    wide = layer.up.element_size() > 2  # products of float32 run in registers
    lanes = min(32 if wide else 64, power(layer.rank, 16))
    blocks, splits = -(-layer.rank // lanes), -(-layer.inputs // _SHARE)
    tiles = min(tokens, tokens // _LINES + adapters)
    inner = x.new_empty((tokens, parts * blocks, splits, lanes), dtype=torch.float32)
    step = groups.members, groups.counts, inner, tokens, adapters
    given = layer.plan, *step, parts, blocks, splits
    same = {"lanes": lanes, "lines": _LINES, "most_adapters": power(adapters, 16), "unit": _EVEN}
    _down[(tiles, splits, parts * blocks)](
        x, layer.down, *given, layer.inputs, **same, share=_SHARE, together=32 if wide else 128,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _up[(tiles, -(-layer.widest // _COLUMNS), parts)](
        y, layer.up, layer.begins, *given, layer.outputs, **same, width=_COLUMNS, even=layer.even,
        num_warps=4, num_stages=2, maxnreg=REGISTERS,
    )  # fmt: skip


@jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["numbers"])
def _group(
    numbers: tl.tensor, members: tl.tensor, counts: tl.tensor, tokens: tl.tensor,
    block: tl.constexpr,
) -> None:  # fmt: skip
    adapter, held = tl.program_id(0), 0
    for begin in range(0, tokens, block):
        token = begin + tl.arange(0, block)
        own = tl.load(numbers + token, mask=token < tokens, other=0) == adapter + 1
        place = held + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(members + adapter * tokens + place, token, mask=own)
        held += tl.sum(own.to(tl.int32), 0)
    tl.store(counts + adapter, held)


@jit()
def _tile_of(
    members: tl.tensor, counts: tl.tensor, tokens: tl.tensor, adapters: tl.tensor,
    lines: tl.constexpr, most_adapters: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """This program's adapter (at least ``adapters`` if it has none), tokens, and which are real."""
    at = tl.arange(0, most_adapters)
    tiles = (tl.load(counts + at, mask=at < adapters, other=0) + lines - 1) // lines
    tile = tl.program_id(0)
    adapter = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    tile -= tl.sum(tl.where(at < adapter, tiles, 0), 0)
    place, known = tile * lines + tl.arange(0, lines), adapter < adapters
    real = place < tl.load(counts + adapter, mask=known, other=0)
    token = tl.load(members + adapter * tokens + place, mask=real, other=0)
    return adapter, token.to(tl.int64), real


# The kernels are specialised for whether sizes are multiples of 16, but not for the sizes, so that
# layers share them.
@jit(do_not_specialize=["tokens", "adapters", "parts", "blocks", "splits"])
def _down(
    x: tl.tensor, down: tl.tensor, plan: tl.tensor, members: tl.tensor, counts: tl.tensor,
    inner: tl.tensor, tokens: tl.tensor, adapters: tl.tensor, parts: tl.tensor,
    blocks: tl.tensor, splits: tl.tensor, inputs: tl.tensor, lanes: tl.constexpr,
    lines: tl.constexpr, most_adapters: tl.constexpr, unit: tl.constexpr, share: tl.constexpr,
    together: tl.constexpr,
) -> None:  # fmt: skip
    adapter, token, real = _tile_of(members, counts, tokens, adapters, lines, most_adapters)
    if adapter >= adapters:
        return
    split, column = tl.program_id(1), tl.program_id(2)
    entry = plan + (adapter * parts + column // blocks) * 3
    first, rank = column % blocks * lanes, tl.load(entry + 2)
    if first >= rank:
        return
    lane = tl.arange(0, lanes)
    weights = down + tl.multiple_of(tl.load(entry), unit) + (first + lane)[:, None] * inputs
    sums = tl.zeros([lines, lanes], tl.float32)
    for begin in range(0, share, together):
        at = (split * share + begin + tl.arange(0, together))[None, :]
        weight = tl.load(
            weights + at, mask=(first + lane < rank)[:, None] & (at < inputs), other=0.0
        )
        value = tl.load(
            x + token[:, None] * inputs + at, mask=real[:, None] & (at < inputs), other=0.0
        )
        sums += tl.dot(value.to(weight.dtype), tl.trans(weight), input_precision="ieee")
    own = (token * (parts * blocks) + column) * splits + split
    tl.store(inner + own[:, None] * lanes + lane[None, :], sums, mask=real[:, None])


@jit(do_not_specialize=["tokens", "adapters", "parts", "blocks", "splits"])
def _up(
    y: tl.tensor, up: tl.tensor, begins: tl.tensor, plan: tl.tensor, members: tl.tensor,
    counts: tl.tensor, inner: tl.tensor, tokens: tl.tensor, adapters: tl.tensor,
    parts: tl.tensor, blocks: tl.tensor, splits: tl.tensor, outputs: tl.tensor,
    lanes: tl.constexpr, lines: tl.constexpr, most_adapters: tl.constexpr, unit: tl.constexpr,
    width: tl.constexpr, even: tl.constexpr,
) -> None:  # fmt: skip
    adapter, token, real = _tile_of(members, counts, tokens, adapters, lines, most_adapters)
    if adapter >= adapters:
        return
    part = tl.program_id(2)
    entry, begin = plan + (adapter * parts + part) * 3, tl.load(begins + part)
    rank, own = tl.load(entry + 2), tl.load(begins + part + 1) - begin
    if (rank == 0) | (tl.program_id(1) * width >= own):
        return
    at = tl.program_id(1) * width + tl.arange(0, width)
    lane, row = tl.arange(0, lanes), (own + unit - 1) // unit * unit
    weights = up + tl.multiple_of(tl.load(entry + 1), unit)
    sums = tl.zeros([lines, width], tl.float32)
    for block in range((rank + lanes - 1) // lanes):
        parted = (token * (parts * blocks) + part * blocks + block) * (splits * lanes)
        value = tl.zeros([lines, lanes], tl.float32)
        for split in tl.range(0, splits, loop_unroll_factor=4):  # loads that need not wait
            parts_at = inner + parted[:, None] + (split * lanes + lane)[None, :]
            value += tl.load(parts_at, mask=real[:, None], other=0.0)
        ranked = (block * lanes + lane)[:, None]
        weight = tl.load(
            weights + ranked * row + at[None, :], mask=(ranked < rank) & (at < own)[None, :],
            other=0.0,
        )  # fmt: skip
        sums += tl.dot(value.to(weight.dtype), weight, input_precision="ieee")
    to = y + token[:, None] * outputs + tl.multiple_of(begin, even) + at[None, :]
    mask = real[:, None] & (at < own)[None, :]
    sums += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, sums.to(y.dtype.element_ty), mask=mask)
