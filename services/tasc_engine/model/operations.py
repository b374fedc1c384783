"""Operations between a Llama-like layer's matrix products: in torch, compiled code and Triton.

`TensorOperations` run on any device. `CompiledOperations` run on a CPU and allocate memory once.
`FusedOperations` run on a GPU as three kernels that read each input once and round once. Only
`FusedOperations` need Triton, which comes with the CUDA builds of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.kernels.cpu import layers
from tasc_engine.kernels.cpu.compiling import bits, numbers
from tasc_engine.kernels.gpu.compiling import jit, power
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import Int64

try:
    import triton.language as tl
except ImportError:
    tl = None

Activation = Callable[[Tensor], Tensor]
_GATES = 1024  # gates per program


class Norm:
    """A root mean square norm (Zhang and Sennrich 2019) over the last dimension.

    Args:
        weight: ``[D]``, or ``[heads, D]`` for one weight per head.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        weight = weight.detach()
        self.wide = weight if weight.dtype == torch.float64 else weight.float()
        self.eps = eps

    @cached_property
    def flat(self) -> NDArray[Any]:
        """The weight as a flat array, for compiled code."""
        return self.wide.reshape(-1).numpy()

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the normed ``[N, D]`` or ``[N, heads, D]``, computed in float32 or float64."""
        full = x.to(self.wide.dtype)
        factor = full.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return full.mul(factor).mul_(self.wide).to(x.dtype)


class Operations(Protocol):
    """Operations on packed tokens; the next call overwrites the result of the last one."""

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add ``delta`` to ``hidden`` in place, both ``[N, D]``; return the normed sum."""

    def apply_rope_and_write_kv(
        self, layer: int, qkv: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """Return queries ``[N, heads, dim]``; write keys and values to the cache.

        Args:
            qkv: ``[N, (heads + 2 * kv_heads) * dim]`` queries, keys and values.
            norm: The norm of each head of queries and keys; None for no norm.
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return ``[N, width]``, activated gates times values.

        Args:
            gate_up: ``[N, 2 * width]``, the gates of each token, then its values.
        """


class TensorOperations:
    """Operations in plain torch.

    Args:
        cos_sin: ``[positions, 2, dim]``, cosines, then sines; the first half of sines is negated.
    """

    def __init__(self, cos_sin: Tensor, heads: int, kv_heads: int, activation: Activation) -> None:
        self.cos_sin, self._activation = cos_sin.unsqueeze(2), activation
        self._heads, self._kv_heads, self._dim = heads, kv_heads, cos_sin.shape[-1]

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Operations`."""
        if delta is not None:
            hidden.add_(delta)
        return norm(hidden)

    def apply_rope_and_write_kv(
        self, layer: int, qkv: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """See `Operations`."""
        assert cache.device is not None, "a forward begins with a layout"
        cos, sin = self.cos_sin.index_select(0, cache.device.positions).unbind(1)
        qkv = qkv.view(len(qkv), self._heads + 2 * self._kv_heads, self._dim)
        rotated = qkv[:, : self._heads + self._kv_heads]
        heads = rotated if norm is None else norm(rotated)
        # Rope (Su et al. 2021). Half of ``sin`` is negated, so a roll suffices to swap the halves.
        rotated.copy_(heads * cos + heads.roll(self._dim // 2, -1) * sin)
        kv = qkv[:, self._heads :].unflatten(1, (2, self._kv_heads))
        cache.keep(layer, kv)
        return qkv[:, : self._heads]

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        gate, value = gate_up.chunk(2, -1)
        return self._activation(gate).mul_(value)


def greatest(logits: Tensor) -> Int64:
    """``int64[M]``, the index of each line's first greatest logit; -1 if a logit is NaN."""
    chosen: Int64 = first_greatest(logits).cpu().numpy()
    return chosen


def first_greatest(logits: Tensor) -> Tensor:
    """Like `greatest`, with the result on the device."""
    highest, place = logits.max(-1)  # the first one if several are equal
    return place.masked_fill_(highest.isnan(), -1)


class CompiledOperations:
    """See `Operations`; the activation of gates is SiLU.

    Args:
        cos_sin: See `TensorOperations`.
    """

    def __init__(self, cos_sin: Tensor, heads: int, kv_heads: int) -> None:
        number = numbers(cos_sin.dtype)
        self._number, self._none = number, np.zeros(0, number)
        wide = cos_sin if number == np.float64 else cos_sin.float()
        self.cos_sin = wide.reshape(-1).numpy()
        self._heads, self._kv_heads, self._dim = heads, kv_heads, cos_sin.shape[-1]
        self._hidden, self._stream = cos_sin, self._none
        self._held: dict[str, tuple[Tensor, NDArray[Any]]] = {}

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Operations`."""
        if hidden is not self._hidden:
            self._hidden, self._stream = hidden, bits(hidden)
        stream = self._stream
        added = stream[:0] if delta is None else bits(delta)
        normed, flat = self._hold("normed", hidden.shape, hidden)
        layers.add_and_norm(stream, added, norm.flat, self._number(norm.eps), flat)
        return normed

    def apply_rope_and_write_kv(
        self, layer: int, qkv: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """See `Operations`."""
        step, pool = cache.current, cache.bits(layer, self._kv_heads, self._dim, qkv)
        query, flat = self._hold("query", (len(qkv), self._heads, self._dim), qkv)
        weights, eps = (self._none, 1.0) if norm is None else (norm.flat, norm.eps)
        layers.apply_rope_and_write_kv(
            bits(qkv), self._heads, self._kv_heads, self._dim, weights, self._number(eps),
            self.cos_sin, step.positions, step.slots, flat, pool,
        )  # fmt: skip
        return query

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        width = gate_up.shape[1] // 2
        out, flat = self._hold("gated", (len(gate_up), width), gate_up)
        layers.gate(bits(gate_up), width, flat)
        return out

    def _hold(self, name: str, shape: Any, like: Tensor) -> tuple[Tensor, NDArray[Any]]:
        """A tensor and its flat elements; each name keeps its tensor until the shape changes."""
        held = self._held.get(name)
        if held is None or held[0].shape != shape:
            made = torch.empty(shape, dtype=like.dtype)
            self._held[name] = held = made, bits(made)
        return held


def choose(logits: Tensor) -> Int64:
    """Like `greatest`, for logits on a CPU."""
    out = np.empty(len(logits), np.int64)
    layers.choose(bits(logits.contiguous()), logits.shape[1], out)
    return out


class FusedOperations:
    """See `Operations`; the activation of gates is SiLU.

    Args:
        cos_sin: See `TensorOperations`.
    """

    def __init__(self, cos_sin: Tensor, heads: int, kv_heads: int) -> None:
        self.cos_sin, self._heads, self._kv_heads = cos_sin.contiguous(), heads, kv_heads
        self._dim = cos_sin.shape[-1]

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Operations`."""
        (tokens, dim), out = hidden.shape, torch.empty_like(hidden)
        added = hidden if delta is None else delta
        _add_and_norm[(tokens,)](
            hidden, added, norm.wide, out, norm.eps, dim=dim, width=power(dim),
            adds=delta is not None, num_warps=4,
        )  # fmt: skip
        return out

    def apply_rope_and_write_kv(
        self, layer: int, qkv: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """See `Operations`."""
        assert cache.device is not None, "a forward begins with a layout"
        tokens, dim = len(qkv), self._dim
        pool = cache.pool(layer, self._kv_heads, dim, qkv)
        query = qkv.new_empty((tokens, self._heads, dim))
        weight, eps = (self.cos_sin, 1.0) if norm is None else (norm.wide, norm.eps)
        _apply_rope_and_write_kv[(tokens, self._heads + 2 * self._kv_heads)](
            qkv, self.cos_sin, weight, cache.device.positions, cache.device.slots, query, pool,
            eps, heads=self._heads, kv_heads=self._kv_heads, dim=dim, width=power(dim),
            normed=norm is not None, num_warps=1,
        )  # fmt: skip
        return query

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((tokens, width))
        _gate[(tokens, -(-width // _GATES))](gate_up, out, width=width, each=_GATES, num_warps=4)
        return out


@jit()
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


# A layout's parts have varying addresses; see `tasc_engine.kernels.gpu.attention`.
@jit(do_not_specialize_on_alignment=["positions", "slots"])
def _apply_rope_and_write_kv(
    qkv: tl.tensor, cos_sin: tl.tensor, weight: tl.tensor, positions: tl.tensor,
    slots: tl.tensor, query: tl.tensor, pool: tl.tensor, eps: tl.tensor, heads: tl.constexpr,
    kv_heads: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, normed: tl.constexpr,
) -> None:  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, width)
    inside, other = place < dim, (place + dim // 2) % dim
    own = qkv + (token * (heads + 2 * kv_heads) + head) * dim
    x = tl.load(own + place, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        swapped = tl.load(own + other, mask=inside, other=0.0).to(tl.float32)
        if normed:
            factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
            x = x * factor * tl.load(weight + head * dim + place, mask=inside, other=0.0)
            weighs = weight + head * dim + other
            swapped = swapped * factor * tl.load(weighs, mask=inside, other=0.0)
        rope = cos_sin + tl.load(positions + token) * (2 * dim) + place
        cos = tl.load(rope, mask=inside, other=0.0).to(tl.float32)
        x = x * cos + swapped * tl.load(rope + dim, mask=inside, other=0.0).to(tl.float32)
    if head < heads:
        at = query + (token * heads + head) * dim + place
        tl.store(at, x.to(query.dtype.element_ty), mask=inside)
    else:
        # No inf or NaN is stored: a later row may use this slot, and masks hide only finite values.
        x = x.to(pool.dtype.element_ty).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        at = pool + (tl.load(slots + token) * (2 * kv_heads) + head - heads) * dim + place
        tl.store(at, x.to(pool.dtype.element_ty), mask=inside)


@jit()
def _gate(gate_up: tl.tensor, out: tl.tensor, width: tl.constexpr, each: tl.constexpr) -> None:
    token, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * each + tl.arange(0, each)
    own, inside = gate_up + token * (2 * width) + place, place < width
    gate = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(own + width, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(out + token * width + place, gated.to(out.dtype.element_ty), mask=inside)
