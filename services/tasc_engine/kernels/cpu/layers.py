"""Compiled operations between the products of a Llama-like layer, and the choice of tokens.

Arrays are flat; their elements are those of `lanes`. Sums are computed in float32 (float64 for
float64), and results are rounded once.
"""

from typing import Any

import numpy as np

from tasc_engine.kernels.cpu.compiling import arithmetic
from tasc_engine.kernels.cpu.lanes import (
    WIDTH,
    add,
    div,
    exponent,
    finite,
    fma,
    greatest,
    load,
    maximum,
    mul,
    narrow,
    splat,
    store,
    sub,
    total,
    widen,
    zeros,
)

_ONE = np.float32(1)  # of the narrower type, so that it widens nothing
_BLOCK = 8 * WIDTH  # logits that are searched again for the greatest


@arithmetic
def add_and_norm(hidden: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """Computes ``hidden += delta``, then writes its RMS norm (Zhang and Sennrich 2019) to ``out``.

    Args:
        hidden, delta, out: ``[N * D]`` elements; an empty ``delta`` adds nothing.
        weight: ``[D]`` numbers.
        eps: A number of the same type.
    """
    width = len(weight)
    for begin in range(0, len(hidden), width):
        if len(delta):
            _add(hidden, delta, begin, width)
        _norm(hidden, begin, width, weight, 0, eps, out, begin)


@arithmetic
def _add(hidden: Any, delta: Any, begin: int, width: int) -> None:
    i, end = begin, begin + width
    while i + WIDTH <= end:
        store(hidden, i, add(load(hidden, i), load(delta, i)))
        i += WIDTH
    while i < end:
        hidden[i] = narrow(widen(hidden[i]) + widen(delta[i]), hidden[0])
        i += 1


@arithmetic
def _norm(
    source: Any, at: int, width: int, weight: Any, first: int, eps: Any, out: Any, to: int
) -> None:
    whole = width // WIDTH * WIDTH
    squares, rest = zeros(weight), eps - eps
    for d in range(0, whole, WIDTH):
        x = load(source, at + d)
        squares = fma(x, x, squares)
    for d in range(whole, width):
        rest += widen(source[at + d]) * widen(source[at + d])
    factor = _ONE / np.sqrt((total(squares) + rest) / np.float32(width) + eps)
    for d in range(0, whole, WIDTH):
        normed = mul(load(source, at + d), splat(factor))
        store(out, to + d, mul(normed, load(weight, first + d)))
    for d in range(whole, width):
        out[to + d] = narrow(widen(source[at + d]) * factor * weight[first + d], out[0])


@arithmetic
def turn_and_keep(
    joined: Any, heads: int, kv_heads: int, dim: int, weights: Any, eps: Any, turns: Any,
    positions: Any, slots: Any, query: Any, pool: Any,
) -> None:  # fmt: skip
    """Norms and rotates queries and keys (rope: Su et al. 2021), and keeps keys and values.

    Args:
        joined: ``[N * (heads + 2 * kv_heads) * dim]`` elements: queries, keys, values of a token;
            normed in place.
        weights: ``[(heads + kv_heads) * dim]``, the weights of each head's norm; empty for none.
        turns: ``[positions * 2 * dim]``, cosines, then sines; the first half of the sines is
            negated.
        slots: ``int64[N]``, the slot of the pool for the keys and values of each token.
        query: ``[N * heads * dim]`` elements, written.
        pool: ``[slots * 2 * kv_heads * dim]`` elements, written at ``slots``.
    """
    turned = heads + kv_heads
    for t in range(len(positions)):
        base, turn = t * (turned + kv_heads) * dim, positions[t] * 2 * dim
        to = slots[t] * 2 * kv_heads * dim
        for h in range(turned):
            at = base + h * dim
            if len(weights):
                _norm(joined, at, dim, weights, h * dim, eps, joined, at)
            if h < heads:
                _turn(joined, at, dim, turns, turn, query, (t * heads + h) * dim)
            else:
                _turn(joined, at, dim, turns, turn, pool, to + (h - heads) * dim)
        values = base + turned * dim
        _copy_finite(pool, to, kv_heads * dim, pool, to)
        _copy_finite(joined, values, kv_heads * dim, pool, to + kv_heads * dim)


@arithmetic
def _turn(joined: Any, at: int, dim: int, turns: Any, turn: int, out: Any, to: int) -> None:
    half, d = dim // 2, 0
    while d + WIDTH <= half:
        x, y = load(joined, at + d), load(joined, at + half + d)
        first = mul(y, load(turns, turn + dim + d))
        second = mul(x, load(turns, turn + dim + half + d))
        store(out, to + d, fma(x, load(turns, turn + d), first))
        store(out, to + half + d, fma(y, load(turns, turn + half + d), second))
        d += WIDTH
    while d < half:
        u, v = widen(joined[at + d]), widen(joined[at + half + d])
        out[to + d] = narrow(u * turns[turn + d] + v * turns[turn + dim + d], out[0])
        second_of = v * turns[turn + half + d] + u * turns[turn + dim + half + d]
        out[to + half + d] = narrow(second_of, out[0])
        d += 1


@arithmetic
def _copy_finite(source: Any, at: int, n: int, pool: Any, to: int) -> None:
    """Copies, with 0 for values that are not finite, since a mask hides only finite numbers."""
    d = 0
    while d + WIDTH <= n:
        store(pool, to + d, finite(load(source, at + d)))
        d += WIDTH
    while d < n:
        pool[to + d] = source[at + d]
        if not abs(widen(source[at + d])) < np.inf:
            pool[to + d] = 0
        d += 1


@arithmetic
def gate(joined: Any, width: int, out: Any) -> None:
    """Computes ``silu(g) * u`` from gates and values side by side, ``[N * 2 * width]``."""
    none = zeros(joined)
    one = exponent(none)
    for begin in range(0, len(out), width):
        at, d = 2 * begin, 0
        while d + WIDTH <= width:
            g = load(joined, at + d)
            grown = add(exponent(sub(none, g)), one)
            store(out, begin + d, mul(div(g, grown), load(joined, at + width + d)))
            d += WIDTH
        while d < width:
            g = widen(joined[at + d])
            value = g / (_ONE + np.exp(-g)) * widen(joined[at + width + d])
            out[begin + d] = narrow(value, out[0])
            d += 1


@arithmetic
def choose(logits: Any, width: int, out: Any) -> None:
    """Finds the first greatest of each line of logits; -1 if one is NaN.

    Args:
        logits: ``[M * width]`` elements.
        out: ``int64[M]``, written.
    """
    for i in range(len(out)):
        out[i] = _first_greatest(logits, i * width, width)


@arithmetic
def _first_greatest(logits: Any, at: int, width: int) -> int:
    best, found = widen(logits[at]), 0
    for block in range(0, width, _BLOCK):
        end = min(block + _BLOCK, width)
        most = _greatest(logits, at + block, end - block)
        if not most <= best:  # greater, or NaN
            best = most
            found = block
            while found < end and widen(logits[at + found]) != most:
                found += 1
        if best != best:
            return -1
    return found


@arithmetic
def _greatest(logits: Any, at: int, n: int) -> Any:
    """The greatest of some logits; NaN if one of them is NaN."""
    most, d = splat(widen(logits[at])), 0
    while d + WIDTH <= n:
        most = maximum(most, load(logits, at + d))
        d += WIDTH
    found = greatest(most)
    while d < n:
        if found == found and not widen(logits[at + d]) <= found:
            found = widen(logits[at + d])
        d += 1
    return found
