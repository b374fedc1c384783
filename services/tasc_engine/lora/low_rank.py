"""Computes the additions of low-rank adapters to linear layers, for tokens whose row uses them.

LoRA (Hu et al. 2021, arXiv 2106.09685): an adapter adds ``x @ down.T @ up.T * scale`` to a layer's
output. `CompiledTokens` uses compiled code on a CPU, and `GroupedTokens` Triton kernels on a GPU.
Both take a few tokens with the same adapter at a time and read only that adapter's weights, so the
result of a token does not depend on other tokens. `MaskedTokens` uses torch on other devices, such
as GPUs without Triton, and in float64. The weights of all adapters of a layer are concatenated, and
a mask selects each token's adapter, so the number of calls does not depend on the number of
adapters. Arrays of compiled code are flat; for their element types, see `simd`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tasc_engine.kernels.cpu.compiling import arithmetic, bits, known, numbers, ordered
from tasc_engine.kernels.cpu.layers import add_to
from tasc_engine.kernels.cpu.simd import WIDTH, add, fma, load, mul, store, tile, to_float32, zeros
from tasc_engine.kernels.gpu import low_rank as grouped


@dataclass(frozen=True)
class LowRank:
    """An adapter's weights of one linear layer.

    Attributes:
        down: ``[r, in]``.
        up: ``[out, r]``.
        scale: Factor of the addition.
    """

    down: Tensor
    up: Tensor
    scale: float

    def cast(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``down`` and the scaled ``up``, in the dtype and on the device of ``like``."""
        up = self.up.double() * self.scale
        return self.down.to(like.device, like.dtype), up.to(like.device, like.dtype)


# Each adapter's weights for each joined layer; None if the adapter adds nothing to the layer.
Weights = Sequence[Sequence[LowRank | None]]
# Adds the adapters' results for inputs ``[..., in]`` to outputs ``[..., out]``, in place.
Addition = Callable[[Tensor, Tensor], None]


class MaskedTokens:
    """Selects each token's adapter with a mask; on any device, with three calls per layer.

    No call waits for the device or depends on values, so the calls can be captured in a CUDA graph.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def begin(self, numbers: Tensor) -> None:
        """Begin a forward with ``int64[N]``, each token's adapter number, 0 for no adapter."""
        self._numbers = numbers
        self._masks.clear()

    def addition(self, weights: Weights, widths: Sequence[int], like: Tensor) -> Addition:
        """Returns a function that adds the results of adapters to a layer, or to joined layers.

        Args:
            widths: Number of outputs of each layer.
            like: A tensor of the dtype and device to work in.
        """
        down, up, ranks = _stacked(weights, widths, like)
        if ranks not in self._tables:
            self._tables[ranks] = _table(ranks, like)

        def add(x: Tensor, y: Tensor) -> None:
            inner = functional.linear(x.reshape(-1, x.shape[-1]), down).mul_(self._mask(ranks))
            y.view(-1, y.shape[-1]).addmm_(inner, up)

        return add

    def _mask(self, ranks: tuple[int, ...]) -> Tensor:
        """``[N, sum of ranks]``, 1 in the columns of the token's adapter; made once per step."""
        if ranks not in self._masks:
            self._masks[ranks] = self._tables[ranks].index_select(0, self._numbers)
        return self._masks[ranks]


def _stacked(
    weights: Weights, widths: Sequence[int], like: Tensor
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """All ``down`` ``[R, in]``, all ``up`` ``[R, out]``, and each adapter's share of R.

    In ``up``, each rank is 0 outside the outputs of its own layer.
    """
    downs, ups, ranks = [], [], []
    for own in weights:
        ranks.append(sum(len(w.down) for w in own if w))
        for part, w in enumerate(own):
            if w:
                down, up = w.cast(like)
                downs.append(down)
                block = [like.new_zeros(len(down), width) for width in widths]
                block[part] = up.T
                ups.append(torch.cat(block, 1))
    return torch.cat(downs), torch.cat(ups), tuple(ranks)


def _table(ranks: tuple[int, ...], like: Tensor) -> Tensor:
    """``[adapters + 1, sum of ranks]``, the mask of each adapter number."""
    owner = torch.arange(1, len(ranks) + 1).repeat_interleave(torch.tensor(ranks))
    numbers = torch.arange(len(ranks) + 1)
    return (numbers[:, None] == owner).to(like.device, like.dtype)


_TOKENS = 4  # number of tokens processed together
_BLOCK = 2 + _TOKENS  # integers per block: adapter, number of valid tokens, tokens
_OUTPUTS = 2 * WIDTH
_one = known(1)


class CompiledTokens:
    """Does the same as `MaskedTokens` in compiled code, on a CPU.

    Args:
        adapters: Number of adapters.
    """

    def __init__(self, adapters: int) -> None:
        self._adapters = adapters
        self._blocks = np.zeros(0, np.int64)
        self._widened = self._inner = self._sums = np.zeros(0)

    def begin(self, numbers: Tensor) -> None:
        """See `MaskedTokens`."""
        blocks = np.empty((len(numbers) // _TOKENS + self._adapters) * _BLOCK, np.int64)
        self._blocks = blocks[: _gather(numbers.numpy(), self._adapters, blocks)]

    def addition(self, weights: Weights, widths: Sequence[int], like: Tensor) -> Addition:
        """See `MaskedTokens`."""
        layer = _laid_out(weights, widths, like.dtype)
        self._hold(layer)

        def add_own(x: Tensor, y: Tensor) -> None:
            _add_low_rank(
                bits(x.contiguous()), bits(y), self._blocks, layer.down, layer.up, layer.scales,
                layer.plan, self._widened, self._inner, self._sums,
            )  # fmt: skip

        add_own(like.new_zeros(0), like.new_zeros(0))  # compiles now, before requests come
        return add_own

    def _hold(self, layer: "_LoraLayout") -> None:
        """Allocate memory for the widest layer; all layers share it."""
        number = layer.scales.dtype
        widest = max(int(layer.plan[0]) * _TOKENS, len(self._widened))
        needed = max(layer.lanes * _TOKENS, len(self._inner))
        self._widened, self._inner = np.zeros(widest, number), np.zeros(needed, number)
        self._sums = np.zeros(_TOKENS * _OUTPUTS, number)


class GroupedTokens:
    """Does the same as `MaskedTokens` with Triton kernels, for adapters that are in the step.

    Args:
        adapters: Number of adapters.
    """

    def __init__(self, adapters: int) -> None:
        self._adapters = adapters

    def begin(self, numbers: Tensor) -> None:
        """See `MaskedTokens`."""
        self._groups = grouped.group(numbers, self._adapters)

    def addition(self, weights: Weights, widths: Sequence[int], like: Tensor) -> Addition:
        """See `MaskedTokens`."""
        pairs = [[w.cast(like) if w else None for w in own] for own in weights]
        layer = grouped.lay_out(pairs, widths)
        return lambda x, y: grouped.add(self._groups, layer, x, y)


AdapterTokens: TypeAlias = MaskedTokens | CompiledTokens | GroupedTokens


@dataclass(frozen=True)
class _LoraLayout:
    """Weights of a layer, or of joined layers (its parts), in the order in which they are read.

    Each rank of an adapter is a lane.

    Attributes:
        down: For each adapter ``[lanes / 16, in, 16]`` elements, with the lanes of all parts side
            by side; unused lanes are 0.
        up: For each adapter and part ``[outputs / 32, rank, 32]`` elements, padded with 0.
        scales: For each adapter ``[lanes]`` numbers.
        plan: Number of inputs, outputs and parts. Then for each part, its first output and its
            number of outputs. Then for each adapter, its offsets in ``down`` and in ``scales`` and
            its number of lanes, and for each part its offset in ``up``, its rank and its first
            lane.
        lanes: Maximum number of lanes of an adapter.
    """

    down: NDArray[Any]
    up: NDArray[Any]
    scales: NDArray[Any]
    plan: NDArray[np.int64]
    lanes: int


def _laid_out(weights: Weights, widths: Sequence[int], dtype: torch.dtype) -> _LoraLayout:
    given = [w for own in weights for w in own if w]
    kept, begins = _kept(given, dtype), np.cumsum([0, *widths]).tolist()
    plan, most_lanes = [given[0].down.shape[1], begins[-1], len(widths)], 0
    for begin, width in zip(begins, widths, strict=False):
        plan += [begin, width]
    downs, ups, scales = list[Tensor](), list[Tensor](), list[float]()
    for own in weights:
        there = [w for w in own if w]
        lanes = _up_to(sum(len(w.down) for w in there), WIDTH)
        plan += [_length(downs), len(scales), lanes]
        most_lanes, first = max(most_lanes, lanes), len(scales)
        for w in own:
            plan += [_length(ups), len(w.down) if w else 0, len(scales) - first]
            if w:
                ups.append(_blocked(w.up.to(kept).T, _OUTPUTS))
                scales += [w.scale] * len(w.down)
        scales += [0.0] * (first + lanes - len(scales))
        downs += [_blocked(torch.cat([w.down.to(kept) for w in there]).T, WIDTH)] if there else []
    flat_scales = np.array(scales, numbers(dtype))
    flat_plan = np.array(plan, np.int64)
    return _LoraLayout(
        bits(torch.cat(downs)), bits(torch.cat(ups)), flat_scales, flat_plan, most_lanes
    )


def _kept(weights: Sequence[LowRank], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights are kept; 16-bit weights keep their dtype, to read less memory."""
    own = {tensor.dtype for w in weights for tensor in (w.down, w.up)}
    short = len(own) == 1 and own <= {torch.float16, torch.bfloat16}
    return own.pop() if short and dtype != torch.float64 else dtype


def _length(flat: Sequence[Tensor]) -> int:
    return sum(len(part) for part in flat)


def _blocked(matrix: Tensor, width: int) -> Tensor:
    """Rearranges ``[rows, n]`` to ``[n / width, rows, width]``, flat and padded with 0."""
    rows, n = matrix.shape
    filled = matrix.new_zeros(rows, _up_to(n, width))
    filled[:, :n] = matrix
    return filled.view(rows, -1, width).transpose(0, 1).reshape(-1)


def _up_to(n: int, step: int) -> int:
    return -(-n // step) * step


@arithmetic
def _gather(tokens: Any, adapters: int, blocks: Any) -> int:
    """Writes blocks of tokens, each for one adapter; returns the number of integers written.

    Args:
        tokens: ``int64[N]``, each token's adapter number.
        blocks: ``int64[*]``, room for ``N // 4 + adapters`` blocks; a block that is not full
            repeats its last token.
    """
    end = 0
    for number in range(1, adapters + 1):
        held = 0
        for t in range(len(tokens)):
            if tokens[t] == number:
                blocks[end], blocks[end + 1] = number, held + 1
                for i in range(held, _TOKENS):
                    blocks[end + 2 + i] = t
                held += 1
                if held == _TOKENS:
                    end, held = end + _BLOCK, 0
        if held:
            end += _BLOCK
    return end


@ordered
def _add_low_rank(
    x: Any, y: Any, blocks: Any, down: Any, up: Any, scales: Any, plan: Any, widened: Any,
    inner: Any, sums: Any,
) -> None:  # fmt: skip
    """Adds each token's adapter result to ``y``.

    Args:
        x: ``[N * in]`` elements.
        y: ``[N * out]`` elements, added to.
        blocks: The blocks that `_gather` wrote.
        down, up, scales, plan: See `_LoraLayout`.
        widened, inner, sums: Working memory for the inputs, the lanes, and some outputs of four
            tokens.
    """
    width, outputs, parts = plan[0], plan[1], plan[2]
    for k in range(0, len(blocks), _BLOCK):
        own = 3 + 2 * parts + (blocks[k] - 1) * (3 + 3 * parts)
        lanes = plan[own + 2]
        if not lanes:
            continue
        for t in range(_TOKENS):
            _widen(x, blocks[k + 2 + t] * width, width, widened, t * width)
        _go_down(widened, width, down, plan[own], scales, plan[own + 1], lanes, inner)
        for p in range(parts):
            at = own + 3 + 3 * p
            if plan[at + 1]:
                _go_up(
                    inner, lanes, plan[at + 2], plan[at + 1], up, plan[at], plan[4 + 2 * p], y,
                    outputs, plan[3 + 2 * p], blocks, k, sums,
                )  # fmt: skip


@ordered
def _widen(x: Any, at: int, width: int, widened: Any, to: int) -> None:
    d = 0
    while d + WIDTH <= width:
        store(widened, to + d, load(x, at + d))
        d += WIDTH
    while d < width:
        widened[to + d] = to_float32(x[at + d])
        d += 1


@ordered
def _go_down(
    widened: Any, width: int, down: Any, at: int, scales: Any, scale_at: int, lanes: int, inner: Any
) -> None:
    """Computes the down-projections of four tokens, ``[4, lanes]``.

    Even and odd inputs have separate sums.
    """
    none, one, even = zeros(inner), _one(), width // 2 * 2
    for j in range(0, lanes, WIDTH):
        a0, a1, a2, a3, b0, b1, b2, b3 = none, none, none, none, none, none, none, none
        base = at + j * width
        for i in range(0, even, 2):
            w, v = load(down, base + i * WIDTH), load(down, base + i * WIDTH + WIDTH)
            a0 = fma(tile(widened, i, one), w, a0)
            b0 = fma(tile(widened, i + 1, one), v, b0)
            s = width + i
            a1, b1 = fma(tile(widened, s, one), w, a1), fma(tile(widened, s + 1, one), v, b1)
            s += width
            a2, b2 = fma(tile(widened, s, one), w, a2), fma(tile(widened, s + 1, one), v, b2)
            s += width
            a3, b3 = fma(tile(widened, s, one), w, a3), fma(tile(widened, s + 1, one), v, b3)
        if even < width:
            w, s = load(down, base + even * WIDTH), even
            a0 = fma(tile(widened, s, one), w, a0)
            a1 = fma(tile(widened, s + width, one), w, a1)
            a2 = fma(tile(widened, s + 2 * width, one), w, a2)
            a3 = fma(tile(widened, s + 3 * width, one), w, a3)
        scale = load(scales, scale_at + j)
        store(inner, j, mul(add(a0, b0), scale))
        store(inner, lanes + j, mul(add(a1, b1), scale))
        store(inner, 2 * lanes + j, mul(add(a2, b2), scale))
        store(inner, 3 * lanes + j, mul(add(a3, b3), scale))


@ordered
def _go_up(
    inner: Any, lanes: int, first: int, rank: int, up: Any, at: int, width: int, y: Any,
    outputs: int, begin: int, blocks: Any, k: int, sums: Any,
) -> None:  # fmt: skip
    """Adds one part's ``width`` outputs, which start at a token's output ``begin``."""
    none, one = zeros(inner), _one()
    for o in range(0, width, _OUTPUTS):
        a0, a1, a2, a3, b0, b1, b2, b3 = none, none, none, none, none, none, none, none
        for r in range(rank):
            base = at + o * rank + r * _OUTPUTS
            w, v = load(up, base), load(up, base + WIDTH)
            s = tile(inner, first + r, one)
            a0, b0 = fma(s, w, a0), fma(s, v, b0)
            s = tile(inner, lanes + first + r, one)
            a1, b1 = fma(s, w, a1), fma(s, v, b1)
            s = tile(inner, 2 * lanes + first + r, one)
            a2, b2 = fma(s, w, a2), fma(s, v, b2)
            s = tile(inner, 3 * lanes + first + r, one)
            a3, b3 = fma(s, w, a3), fma(s, v, b3)
        if blocks[k + 1] == _TOKENS and o + _OUTPUTS <= width:
            to = begin + o
            t0, t1 = blocks[k + 2] * outputs + to, blocks[k + 3] * outputs + to
            t2, t3 = blocks[k + 4] * outputs + to, blocks[k + 5] * outputs + to
            store(y, t0, add(load(y, t0), a0))
            store(y, t0 + WIDTH, add(load(y, t0 + WIDTH), b0))
            store(y, t1, add(load(y, t1), a1))
            store(y, t1 + WIDTH, add(load(y, t1 + WIDTH), b1))
            store(y, t2, add(load(y, t2), a2))
            store(y, t2 + WIDTH, add(load(y, t2 + WIDTH), b2))
            store(y, t3, add(load(y, t3), a3))
            store(y, t3 + WIDTH, add(load(y, t3 + WIDTH), b3))
            continue
        store(sums, 0, a0)
        store(sums, WIDTH, b0)
        store(sums, 2 * WIDTH, a1)
        store(sums, 3 * WIDTH, b1)
        store(sums, 4 * WIDTH, a2)
        store(sums, 5 * WIDTH, b2)
        store(sums, 6 * WIDTH, a3)
        store(sums, 7 * WIDTH, b3)
        for t in range(blocks[k + 1]):
            to = blocks[k + 2 + t] * outputs + begin + o
            add_to(y, to, sums, t * _OUTPUTS, min(_OUTPUTS, width - o))
