"""What low-rank adapters add to linear layers, in compiled code.

Tokens of one adapter are taken four at a time, whichever rows they are of, and only their own
adapter's weights are read: the time does not depend on how many adapters there are, and what a
token gets does not depend on which others stand beside it. Arrays are flat; their elements are
those of `lanes`. LoRA: Hu et al. 2021, arXiv 2106.09685.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.cpu.bits import bits, numbers
from tasc_engine.cpu.compiling import arithmetic
from tasc_engine.cpu.lanes import WIDTH, add, fma, load, narrow, store, tile, widen, zeros
from tasc_engine.cpu.sizes import known
from tasc_engine.low_rank import Addition, Weights

_TOKENS = 4  # taken together
_BLOCK = 2 + _TOKENS  # numbers of a block: its adapter, how many tokens count, the tokens
_OUTPUTS = 2 * WIDTH
_one = known(1)


class CompiledTokens:
    """See `tasc_engine.low_rank.Tokens`; on a CPU.

    Args:
        adapters: How many there are.
    """

    def __init__(self, adapters: int) -> None:
        self.count = 0
        self._adapters = adapters
        self._blocks = np.zeros(0, np.int64)
        self._widened = self._inner = self._sums = np.zeros(0)

    def begin(self, numbers: Tensor) -> None:
        """See `Tokens`."""
        self.count = len(numbers)
        blocks = np.empty((self.count // _TOKENS + self._adapters) * _BLOCK, np.int64)
        self._blocks = blocks[: _gather(numbers.numpy(), self._adapters, blocks)]

    def addition(self, weights: Weights, widths: Sequence[int], like: Tensor) -> Addition:
        """See `Tokens`."""
        down, up, plan, most = _laid_out(weights, widths, like)
        self._hold(int(plan[0]), most, numbers(like.dtype))
        flat_down, flat_up = bits(down), bits(up)

        def add_own(x: Tensor, y: Tensor) -> None:
            if len(self._blocks):
                _add_low_rank(
                    bits(x.contiguous()), bits(y), self._blocks, flat_down, flat_up, plan,
                    self._widened, self._inner, self._sums,
                )  # fmt: skip

        return add_own

    def _hold(self, width: int, lanes: int, number: Any) -> None:
        """Memory for the widest layer; all layers work in the same."""
        widest = max(width * _TOKENS, len(self._widened))
        most = max(lanes * _TOKENS, len(self._inner))
        self._widened, self._inner = np.zeros(widest, number), np.zeros(most, number)
        self._sums = np.zeros(_TOKENS * _OUTPUTS, number)


def _laid_out(
    weights: Weights, widths: Sequence[int], like: Tensor
) -> tuple[Tensor, Tensor, NDArray[np.int64], int]:
    """Weights in the order they are read, where each begins, and the most lanes of an adapter.

    Of an adapter lies ``[in, lanes]`` in the first, the ranks of all parts beside each other, and
    ``[rank, outputs]`` of each part in the second; lanes and outputs are filled up with zeros.
    """
    size = next(w.down.shape[1] for own in weights for w in own if w)
    plan = [size, sum(widths), len(widths)]
    for begin, width in zip(np.cumsum([0, *widths]), widths, strict=False):
        plan += [int(begin), width]
    downs, ups, most, down_at, up_at = [], [], 0, 0, 0
    for own in weights:
        pairs = [w.cast(like) if w else None for w in own]
        ranks = [len(pair[0]) if pair else 0 for pair in pairs]
        lanes = _up_to(sum(ranks), WIDTH)
        plan += [down_at, lanes]
        stacked = like.new_zeros(size, lanes)
        for pair, rank, first, width in zip(
            pairs, ranks, np.cumsum([0, *ranks]), widths, strict=False
        ):
            plan += [up_at, rank, int(first)]
            if pair:
                stacked[:, first : first + rank] = pair[0].T
                wide = like.new_zeros(rank, _up_to(width, _OUTPUTS))
                wide[:, :width] = pair[1].T
                ups.append(wide.reshape(-1))
                up_at += wide.numel()
        downs.append(stacked.reshape(-1))
        down_at, most = down_at + stacked.numel(), max(most, lanes)
    return torch.cat(downs), torch.cat(ups), np.array(plan, np.int64), most


def _up_to(n: int, step: int) -> int:
    return -(-n // step) * step


@arithmetic
def _gather(tokens: Any, adapters: int, blocks: Any) -> int:
    """Blocks of tokens of one adapter each; how many numbers of ``blocks`` were written.

    Args:
        tokens: ``int64[N]`` the number of each token's adapter.
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


@arithmetic
def _add_low_rank(
    x: Any, y: Any, blocks: Any, down: Any, up: Any, plan: Any, widened: Any, inner: Any, sums: Any
) -> None:
    """Add to outputs what their tokens' adapters make of inputs.

    Args:
        x: ``[N * in]`` elements.
        y: ``[N * out]`` elements, added to.
        blocks: What `_gather` wrote.
        down, up, plan: What `_laid_out` gives.
        widened, inner, sums: Numbers to work in: four tokens' inputs, their ranks' lanes, and
            some of their outputs.
    """
    width, outputs, parts = plan[0], plan[1], plan[2]
    for k in range(0, len(blocks), _BLOCK):
        own = 3 + 2 * parts + (blocks[k] - 1) * (2 + 3 * parts)
        lanes = plan[own + 1]
        if not lanes:
            continue
        for t in range(_TOKENS):
            _widen(x, blocks[k + 2 + t] * width, width, widened, t * width)
        _go_down(widened, width, down, plan[own], lanes, inner)
        for p in range(parts):
            at = own + 2 + 3 * p
            if plan[at + 1]:
                _go_up(
                    inner, lanes, plan[at + 2], plan[at + 1], up, plan[at], plan[4 + 2 * p], y,
                    outputs, plan[3 + 2 * p], blocks, k, sums,
                )  # fmt: skip


@arithmetic
def _widen(x: Any, at: int, width: int, widened: Any, to: int) -> None:
    d = 0
    while d + WIDTH <= width:
        store(widened, to + d, load(x, at + d))
        d += WIDTH
    while d < width:
        widened[to + d] = widen(x[at + d])
        d += 1


@arithmetic
def _go_down(widened: Any, width: int, down: Any, at: int, lanes: int, inner: Any) -> None:
    """``[4, lanes]`` of an adapter's ranks; even and odd inputs have sums of their own."""
    none, one, even = zeros(inner), _one(), width // 2 * 2
    for j in range(0, lanes, WIDTH):
        a0, a1, a2, a3, b0, b1, b2, b3 = none, none, none, none, none, none, none, none
        for i in range(0, even, 2):
            w, v = load(down, at + i * lanes + j), load(down, at + (i + 1) * lanes + j)
            a0, b0 = fma(tile(widened, i, one), w, a0), fma(tile(widened, i + 1, one), v, b0)
            s = width + i
            a1, b1 = fma(tile(widened, s, one), w, a1), fma(tile(widened, s + 1, one), v, b1)
            s += width
            a2, b2 = fma(tile(widened, s, one), w, a2), fma(tile(widened, s + 1, one), v, b2)
            s += width
            a3, b3 = fma(tile(widened, s, one), w, a3), fma(tile(widened, s + 1, one), v, b3)
        if even < width:
            w = load(down, at + even * lanes + j)
            a0, a1 = fma(tile(widened, even, one), w, a0), fma(tile(widened, width + even, one), w, a1)
            a2 = fma(tile(widened, 2 * width + even, one), w, a2)
            a3 = fma(tile(widened, 3 * width + even, one), w, a3)
        store(inner, j, add(a0, b0))
        store(inner, lanes + j, add(a1, b1))
        store(inner, 2 * lanes + j, add(a2, b2))
        store(inner, 3 * lanes + j, add(a3, b3))


@arithmetic
def _go_up(
    inner: Any, lanes: int, first: int, rank: int, up: Any, at: int, width: int, y: Any,
    outputs: int, begin: int, blocks: Any, k: int, sums: Any,
) -> None:  # fmt: skip
    """Add one part's ``width`` outputs, which begin at ``begin`` of a token's."""
    none, one, step = zeros(inner), _one(), (width + _OUTPUTS - 1) // _OUTPUTS * _OUTPUTS
    for o in range(0, width, _OUTPUTS):
        a0, a1, a2, a3, b0, b1, b2, b3 = none, none, none, none, none, none, none, none
        for r in range(rank):
            w, v = load(up, at + r * step + o), load(up, at + r * step + o + WIDTH)
            s = tile(inner, first + r, one)
            a0, b0 = fma(s, w, a0), fma(s, v, b0)
            s = tile(inner, lanes + first + r, one)
            a1, b1 = fma(s, w, a1), fma(s, v, b1)
            s = tile(inner, 2 * lanes + first + r, one)
            a2, b2 = fma(s, w, a2), fma(s, v, b2)
            s = tile(inner, 3 * lanes + first + r, one)
            a3, b3 = fma(s, w, a3), fma(s, v, b3)
        if blocks[k + 1] == 4 and o + _OUTPUTS <= width:
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
            _add_to(y, to, sums, t * _OUTPUTS, min(_OUTPUTS, width - o))


@arithmetic
def _add_to(y: Any, to: int, sums: Any, at: int, n: int) -> None:
    d = 0
    while d + WIDTH <= n:
        store(y, to + d, add(load(y, to + d), load(sums, at + d)))
        d += WIDTH
    while d < n:
        y[to + d] = narrow(widen(y[to + d]) + sums[at + d], y[0])
        d += 1
