"""What lies between the products of a Llama-like layer, on a GPU: three kernels in Triton.

Each reads its inputs once and rounds once. It knows no weights but those it is given and no rows.
Triton comes with the CUDA builds of torch; without it this module imports and cannot be used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasc_engine.kv.cache import RowCache
from tasc_engine.model.operations import Norm

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_GATES = 1024  # a program


class FusedOperations:
    """See `Operations`; the activation of gates is SiLU.

    Args:
        turns: See `TensorOperations`.
    """

    def __init__(self, turns: Tensor, heads: int, kv_heads: int) -> None:
        self._turns, self._heads, self._kv_heads = turns.contiguous(), heads, kv_heads
        self._dim = turns.shape[-1]

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Operations`."""
        (tokens, dim), out = hidden.shape, torch.empty_like(hidden)
        added = hidden if delta is None else delta
        _add_and_norm[(tokens,)](
            hidden, added, norm.wide, out, norm.eps, dim=dim, width=_power(dim),
            adds=delta is not None, num_warps=4,
        )  # fmt: skip
        return out

    def turn_and_keep(
        self, layer: int, joined: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """See `Operations`."""
        assert cache.device is not None, "a forward begins with a layout"
        tokens, dim = len(joined), self._dim
        pool = cache.pool(layer, self._kv_heads, dim, joined)
        query = joined.new_empty((tokens, self._heads, dim))
        weight, eps = (self._turns, 1.0) if norm is None else (norm.wide, norm.eps)
        _turn_and_keep[(tokens, self._heads + 2 * self._kv_heads)](
            joined, self._turns, weight, cache.device.positions, cache.device.places, query, pool,
            eps, heads=self._heads, kv_heads=self._kv_heads, dim=dim, width=_power(dim),
            normed=norm is not None, num_warps=1,
        )  # fmt: skip
        return query

    def gate(self, joined: Tensor) -> Tensor:
        """See `Operations`."""
        tokens, width = joined.shape[0], joined.shape[1] // 2
        out = joined.new_empty((tokens, width))
        _gate[(tokens, -(-width // _GATES))](joined, out, width=width, each=_GATES, num_warps=4)
        return out


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _add_and_norm(
    hidden: tl.tensor, delta: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor,
    dim: tl.constexpr, width: tl.constexpr, adds: tl.constexpr,
) -> None:  # fmt: skip
    place = tl.arange(0, width)
    at, inside = tl.program_id(0).to(tl.int64) * dim + place, place < dim
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        kept = x.to(hidden.dtype.element_ty)
        tl.store(hidden + at, kept, mask=inside)
        x = kept.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
    x = x * factor * tl.load(weight + place, mask=inside, other=0.0)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@_jit
def _turn_and_keep(
    joined: tl.tensor, turns: tl.tensor, weight: tl.tensor, positions: tl.tensor,
    places: tl.tensor, query: tl.tensor, pool: tl.tensor, eps: tl.tensor, heads: tl.constexpr,
    kv_heads: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, normed: tl.constexpr,
) -> None:  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, width)
    inside, other = place < dim, (place + dim // 2) % dim
    own = joined + (token * (heads + 2 * kv_heads) + head) * dim
    x = tl.load(own + place, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        swapped = tl.load(own + other, mask=inside, other=0.0).to(tl.float32)
        if normed:
            factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
            x = x * factor * tl.load(weight + head * dim + place, mask=inside, other=0.0)
            weighs = weight + head * dim + other
            swapped = swapped * factor * tl.load(weighs, mask=inside, other=0.0)
        turn = turns + tl.load(positions + token) * (2 * dim) + place
        cos = tl.load(turn, mask=inside, other=0.0).to(tl.float32)
        x = x * cos + swapped * tl.load(turn + dim, mask=inside, other=0.0).to(tl.float32)
    if head < heads:
        at = query + (token * heads + head) * dim + place
        tl.store(at, x.to(query.dtype.element_ty), mask=inside)
    else:
        # A mask hides a finite number only, and what is left over must be hidden from later rows.
        x = x.to(pool.dtype.element_ty).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        at = pool + (tl.load(places + token) * (2 * kv_heads) + head - heads) * dim + place
        tl.store(at, x.to(pool.dtype.element_ty), mask=inside)


@_jit
def _gate(joined: tl.tensor, out: tl.tensor, width: tl.constexpr, each: tl.constexpr) -> None:
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * each + tl.arange(0, each)
    own, inside = joined + token * (2 * width) + place, place < width
    gate = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(own + width, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(out + token * width + place, gated.to(out.dtype.element_ty), mask=inside)
