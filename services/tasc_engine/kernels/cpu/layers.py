"""Compiled operations between a Llama-like layer's matrix products, and the choice of tokens.

Arrays are flat; for their element types, see `simd`. Sums are computed in float32 (float64 for
float64), and results are rounded once.
"""

from typing import Any

import numpy as np

from tasc_engine.kernels.cpu.compiling import ordered
from tasc_engine.kernels.cpu.simd import (
    WIDTH,
    add,
    broadcast,
    div,
    exp,
    finite,
    fma,
    greatest,
    load,
    maximum,
    mul,
    round_to_storage,
    store,
    sub,
    to_float32,
    total,
    zeros,
)

_ONE = np.float32(1)  # the narrower type, so that float32 values are not widened
_BLOCK = 8 * WIDTH  # logits per block; only blocks with a new greatest logit are searched for it


@ordered
def add_and_norm(hidden: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """Computes ``hidden += delta``, then the RMS norm of ``hidden`` (Zhang and Sennrich 2019).

    Args:
        hidden, delta, out: ``[N * D]`` elements; an empty ``delta`` adds nothing.
        weight: ``[D]`` numbers.
        eps: A number of the same type.
    """
    width = len(weight)
    for begin in range(0, len(hidden), width):
        if len(delta):
            add_to(hidden, begin, delta, begin, width)
        _norm(hidden, begin, width, weight, 0, eps, out, begin)


@ordered
def add_to(sums: Any, to: int, more: Any, at: int, n: int) -> None:
    """Adds ``more[at : at + n]`` to ``sums[to : to + n]``, element by element."""
    d = 0
    while d + WIDTH <= n:
        store(sums, to + d, add(load(sums, to + d), load(more, at + d)))
        d += WIDTH
    while d < n:
        found = to_float32(sums[to + d]) + to_float32(more[at + d])
        sums[to + d] = round_to_storage(found, sums[0])
        d += 1


@ordered
def _norm(
    source: Any, at: int, width: int, weight: Any, first: int, eps: Any, out: Any, to: int
) -> None:
    whole = width // WIDTH * WIDTH
    squares, rest = zeros(weight), eps - eps
    for d in range(0, whole, WIDTH):
        x = load(source, at + d)
        squares = fma(x, x, squares)
    for d in range(whole, width):
        rest += to_float32(source[at + d]) * to_float32(source[at + d])
    factor = _ONE / np.sqrt((total(squares) + rest) / np.float32(width) + eps)
    for d in range(0, whole, WIDTH):
        normed = mul(load(source, at + d), broadcast(factor))
        store(out, to + d, mul(normed, load(weight, first + d)))
    for d in range(whole, width):
        normed_one = to_float32(source[at + d]) * factor * weight[first + d]
        out[to + d] = round_to_storage(normed_one, out[0])


@ordered
def apply_rope_and_write_kv(
    qkv: Any, heads: int, kv_heads: int, dim: int, weights: Any, eps: Any, cos_sin: Any,
    positions: Any, slots: Any, query: Any, pool: Any,
) -> None:  # fmt: skip
    """Norms and rotates queries and keys (rope: Su et al. 2021), and writes keys and values.

    Args:
        qkv: ``[N * (heads + 2 * kv_heads) * dim]`` elements: for each token its queries, keys
            and values; normed in place.
        weights: ``[(heads + kv_heads) * dim]``, the weights of each head's norm; empty for none.
        cos_sin: ``[positions * 2 * dim]``, cosines, then sines; the first half of the sines is
            negated.
        slots: ``int64[N]``, the slot of the pool for the keys and values of each token.
        query: ``[N * heads * dim]`` elements, written.
        pool: ``[slots * 2 * kv_heads * dim]`` elements, written at ``slots``.
    """
    rotated = heads + kv_heads
    for t in range(len(positions)):
        base, rope = t * (rotated + kv_heads) * dim, positions[t] * 2 * dim
        to = slots[t] * 2 * kv_heads * dim
        for h in range(rotated):
            at = base + h * dim
            if len(weights):
                _norm(qkv, at, dim, weights, h * dim, eps, qkv, at)
            if h < heads:
                _apply_rope(qkv, at, dim, cos_sin, rope, query, (t * heads + h) * dim)
            else:
                _apply_rope(qkv, at, dim, cos_sin, rope, pool, to + (h - heads) * dim)
        values = base + rotated * dim
        _copy_finite(pool, to, kv_heads * dim, pool, to)
        _copy_finite(qkv, values, kv_heads * dim, pool, to + kv_heads * dim)


@ordered
def _apply_rope(qkv: Any, at: int, dim: int, cos_sin: Any, rope: int, out: Any, to: int) -> None:
    half, d = dim // 2, 0
    while d + WIDTH <= half:
        x, y = load(qkv, at + d), load(qkv, at + half + d)
        first = mul(y, load(cos_sin, rope + dim + d))
        second = mul(x, load(cos_sin, rope + dim + half + d))
        store(out, to + d, fma(x, load(cos_sin, rope + d), first))
        store(out, to + half + d, fma(y, load(cos_sin, rope + half + d), second))
        d += WIDTH
    while d < half:
        u, v = to_float32(qkv[at + d]), to_float32(qkv[at + half + d])
        out[to + d] = round_to_storage(u * cos_sin[rope + d] + v * cos_sin[rope + dim + d], out[0])
        second_of = v * cos_sin[rope + half + d] + u * cos_sin[rope + dim + half + d]
        out[to + half + d] = round_to_storage(second_of, out[0])
        d += 1


@ordered
def _copy_finite(source: Any, at: int, n: int, pool: Any, to: int) -> None:
    """Copies elements, with 0 for infinities and NaNs, since a mask hides only finite numbers."""
    d = 0
    while d + WIDTH <= n:
        store(pool, to + d, finite(load(source, at + d)))
        d += WIDTH
    while d < n:
        pool[to + d] = source[at + d]
        if not abs(to_float32(source[at + d])) < np.inf:
            pool[to + d] = 0
        d += 1


@ordered
def gate(gate_up: Any, width: int, out: Any) -> None:
    """Computes ``silu(g) * u``.

    Args:
        gate_up: ``[N * 2 * width]`` elements, for each token its gates g, then its values u.
    """
    none = zeros(gate_up)
    one = exp(none)
    for begin in range(0, len(out), width):
        at, d = 2 * begin, 0
        while d + WIDTH <= width:
            g = load(gate_up, at + d)
            grown = add(exp(sub(none, g)), one)
            store(out, begin + d, mul(div(g, grown), load(gate_up, at + width + d)))
            d += WIDTH
        while d < width:
            g = to_float32(gate_up[at + d])
            value = g / (_ONE + np.exp(-g)) * to_float32(gate_up[at + width + d])
            out[begin + d] = round_to_storage(value, out[0])
            d += 1


@ordered
def choose(logits: Any, width: int, out: Any) -> None:
    """Finds the index of each line's first greatest logit; -1 if a logit is NaN.

    Args:
        logits: ``[M * width]`` elements.
        out: ``int64[M]``, written.
    """
    for i in range(len(out)):
        out[i] = _first_greatest(logits, i * width, width)


@ordered
def _first_greatest(logits: Any, at: int, width: int) -> int:
    best, found = to_float32(logits[at]), 0
    for block in range(0, width, _BLOCK):
        end = min(block + _BLOCK, width)
        highest = _greatest(logits, at + block, end - block)
        if not highest <= best:  # greater, or NaN
            best = highest
            found = block
            while found < end and to_float32(logits[at + found]) != highest:
                found += 1
        if best != best:
            return -1
    return found


@ordered
def _greatest(logits: Any, at: int, n: int) -> Any:
    """The greatest of some logits; NaN if one of them is NaN."""
    highest, d = broadcast(to_float32(logits[at])), 0
    while d + WIDTH <= n:
        highest = maximum(highest, load(logits, at + d))
        d += WIDTH
    found = greatest(highest)
    while d < n:
        if found == found and not to_float32(logits[at + d]) <= found:
            found = to_float32(logits[at + d])
        d += 1
    return found
