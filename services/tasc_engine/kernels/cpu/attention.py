"""Attention of a step's rows over their slots in the cache, in compiled code.

A token sees the first slots of its row and, if it is a node of a draft, the nodes above it (tree
attention: Miao et al. 2024, arXiv 2305.09781). The queries of all heads and of as many tokens of a
row as fit are processed together, one query per lane of a vector. If too few queries remain to fill
a vector, each of them takes several lanes. Rows with many tokens are left to torch's attention,
which has a higher overhead but multiplies faster.

If attention has to be exact, a token's result has the same bits, whichever tokens share the step:
the number of lanes of a query depends on the model alone, and sums run from the first visible slot
to the last. Hidden slots between them have weight 0 and change no sum.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.errors import UnsupportedModel
from tasc_engine.kernels.cpu.compiling import Size, bits, known, numbers, ordered, value
from tasc_engine.kernels.cpu.simd import (
    WIDTH,
    add,
    broadcast,
    div,
    exp,
    fma,
    fold,
    load,
    maximum,
    mul,
    prefetch,
    round_to_storage,
    store,
    sub,
    tile,
    to_float32,
    zeros,
)
from tasc_engine.kernels.torch_attention import RowByRow
from tasc_engine.layout import Int64, StepLayout

MAX_LANES = 256  # queries scored together
_TAKEN = 8  # slots processed together
_LINE = 64  # bytes that memory gives together
_AHEAD = 16  # slots between those that are processed and those that are requested from memory
_one, _two, _four, _eight, _sixteen = (known(n) for n in (1, 2, 4, 8, 16))


class Scratch:
    """Working memory for one attention call at a time; it grows for longer rows.

    Args:
        dtype: Data type of sums: float64 for float64 inputs, otherwise float32.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: Any) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        self.size = Size(head_dim)
        self.tokens = max(MAX_LANES // heads, 1)  # processed together
        # Scores of one slot, one per query; a store may reach up to one vector beyond the last.
        self.lanes = _up(self.tokens * heads) + WIDTH
        self.queries = np.zeros(head_dim * self.lanes, dtype)
        self.keys = np.zeros(_TAKEN * _up(head_dim), dtype)
        self.values = np.zeros(_TAKEN * _up(head_dim), dtype)
        self.sums = np.zeros(self.tokens * heads * _up(head_dim), dtype)
        self.totals = np.zeros(self.lanes, dtype)
        self.scores = np.zeros(0, dtype)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """The arguments of `attend` from ``queries`` to ``sums``."""
        return self.queries, self.keys, self.values, self.scores, self.totals, self.sums

    def hold(self, slots: int) -> None:
        """Makes room for a row with this number of slots."""
        needed = (slots + _TAKEN) * self.lanes
        if len(self.scores) < needed:
            self.scores = np.zeros(needed, self.totals.dtype)


@ordered
def _up(n: int) -> int:
    return (n + WIDTH - 1) // WIDTH * WIDTH


@ordered
def attend(
    query: Any, pool: Any, positions: Any, visible_lens: Any, tree: Any, query_offsets: Any,
    kv_starts: Any, trunks: Any, nodes: Any, rows: Any, begins: Any, ends: Any, heads: int,
    kv_heads: int, size: Any, together: int, scale: Any, window: int, softcap: Any, queries: Any,
    keys: Any, values: Any, scores: Any, totals: Any, sums: Any, out: Any, exact: bool,
) -> None:  # fmt: skip
    """See `RowCache.attend` and `StepLayout`.

    Args:
        query, out: ``[N * heads * head_dim]`` elements, see `simd`.
        pool: ``[slots * 2 * kv_heads * head_dim]`` elements of one layer.
        rows: ``int64[n]``, the rows to process.
        begins, ends: ``int64[n]``, the tokens of each of these rows to process, as indices of the
            step's tokens; the part of ``out`` of other tokens is not changed.
        together: Number of tokens that are processed together.
        queries, keys, values, scores, totals, sums: The memory of a `Scratch`.
        exact: Whether the bits of a token's result must not depend on other tokens.
    """
    dim = value(size)
    shared, step = heads // kv_heads, 2 * kv_heads * dim
    for i in range(len(rows)):
        r = rows[i]
        slots = trunks[r] + nodes[r]
        node = query_offsets[r + 1] - nodes[r]
        for token in range(begins[i], ends[i], together):
            tokens = min(together, ends[i] - token)
            n, lanes = tokens * shared, _up(tokens * heads) + WIDTH
            low = _lowest(positions, token, tokens, window)
            end = slots if token + tokens > node else visible_lens[token + tokens - 1]
            for g in range(kv_heads):
                at = (kv_starts[r] + low) * step + g * dim
                _score(
                    query, token, n, g, shared, heads, size, scale, pool, at, step, end - low,
                    queries, keys, scores, g * n, lanes, exact,
                )  # fmt: skip
            if softcap > 0:
                _cap(scores, end - low, lanes, tokens * heads, softcap)
            for t in range(token, token + tokens):
                lane = (t - token) * shared
                if window:
                    hidden = positions[t] + 1 - window - low
                    for p in range(hidden):
                        _hide(scores, p * lanes + lane, n, kv_heads, shared)
                for p in range(max(visible_lens[t], low), end):
                    b = p - trunks[r]
                    if (
                        b < 0
                        or not (tree[t] >> b) & 1
                        or (window and positions[t] - positions[node + b] >= window)
                    ):
                        _hide(scores, (p - low) * lanes + lane, n, kv_heads, shared)
            _weigh(scores, end - low, lanes, tokens * heads, totals)
            for g in range(kv_heads):
                at = (kv_starts[r] + low) * step + (kv_heads + g) * dim
                _sum(pool, at, step, end - low, n, size, scores, g * n, lanes, values, sums, exact)
                _scatter(sums, totals, token, n, g, shared, heads, size, out)


@ordered
def _lowest(positions: Any, token: int, tokens: int, window: int) -> int:
    """The first slot that any of the tokens sees; nodes are not ordered by depth."""
    if not window:
        return 0
    first = positions[token]
    for t in range(token + 1, token + tokens):
        first = min(first, positions[t])
    return max(0, first + 1 - window)


@ordered
def _gather(
    query: Any, token: int, begin: int, end: int, g: int, shared: int, heads: int, size: Any,
    scale: Any, queries: Any, slices: Any,
) -> None:  # fmt: skip
    """Scales queries of one KV head and spreads each over ``slices`` lanes of ``queries``.

    Lane s of a query has its elements s, s + slices, s + 2 * slices, and so on.
    """
    dim, each = value(size), value(slices)
    together = WIDTH // each
    for i in range((end - begin + together - 1) // together * together):
        q = begin + i
        at = ((token + q // shared) * heads + g * shared + q % shared) * dim
        to = i // together * dim * together + i % together * each
        for d in range(0, dim, each):
            for s in range(each):
                x = to_float32(query[at + d + s]) * scale if q < end else scale - scale
                queries[to + d * together + s] = x


@ordered
def _request(pool: Any, at: int, size: Any) -> None:
    """Requests a slot's keys or values, which are too far apart for the processor to foresee."""
    for d in range(0, value(size), _LINE // pool.itemsize):
        prefetch(pool, at + d)


@ordered
def _convert(source: Any, at: int, size: Any, target: Any, to: int) -> None:
    dim = value(size)
    d = 0
    while d + WIDTH <= dim:
        store(target, to + d, load(source, at + d))
        d += WIDTH
    while d < dim:
        target[to + d] = to_float32(source[at + d])
        d += 1


@ordered
def _score(
    query: Any, token: int, n: int, g: int, shared: int, heads: int, size: Any, scale: Any,
    pool: Any, at: int, step: int, slots: int, queries: Any, keys: Any, scores: Any, first: int,
    stride: int, exact: bool,
) -> None:  # fmt: skip
    """Computes the scores of one KV head: of queries that fill vectors, then of the remaining ones.

    The fewer queries remain, the more lanes each of them takes. In exact attention, each takes as
    many as if there were a single token.
    """
    s1, s2, s4, s8, s16 = _one(), _two(), _four(), _eight(), _sixteen()
    full = n // WIDTH * WIDTH if value(size) % WIDTH == 0 else n
    left = n - full
    if exact and value(size) % WIDTH == 0 and shared <= 8:
        full = left = 0
        if shared > 4:
            _gather(query, token, 0, n, g, shared, heads, size, scale, queries, s2)
            _score_lanes(pool, at, step, slots, queries, keys, scores, first, stride, size, s2, n)
        elif shared > 2:
            _gather(query, token, 0, n, g, shared, heads, size, scale, queries, s4)
            _score_lanes(pool, at, step, slots, queries, keys, scores, first, stride, size, s4, n)
        elif shared > 1:
            _gather(query, token, 0, n, g, shared, heads, size, scale, queries, s8)
            _score_lanes(pool, at, step, slots, queries, keys, scores, first, stride, size, s8, n)
        else:
            _gather(query, token, 0, n, g, shared, heads, size, scale, queries, s16)
            _score_lanes(pool, at, step, slots, queries, keys, scores, first, stride, size, s16, n)
    elif exact:
        full, left = n, 0
    if full:
        _gather(query, token, 0, full, g, shared, heads, size, scale, queries, s1)
        _score_lanes(pool, at, step, slots, queries, keys, scores, first, stride, size, s1, full)
    if left:
        to = first + full
        if left > 8:
            _gather(query, token, full, n, g, shared, heads, size, scale, queries, s1)
            _score_lanes(pool, at, step, slots, queries, keys, scores, to, stride, size, s1, left)
        elif left > 4:
            _gather(query, token, full, n, g, shared, heads, size, scale, queries, s2)
            _score_lanes(pool, at, step, slots, queries, keys, scores, to, stride, size, s2, left)
        elif left > 2:
            _gather(query, token, full, n, g, shared, heads, size, scale, queries, s4)
            _score_lanes(pool, at, step, slots, queries, keys, scores, to, stride, size, s4, left)
        elif left > 1:
            _gather(query, token, full, n, g, shared, heads, size, scale, queries, s8)
            _score_lanes(pool, at, step, slots, queries, keys, scores, to, stride, size, s8, left)
        else:
            _gather(query, token, full, n, g, shared, heads, size, scale, queries, s16)
            _score_lanes(pool, at, step, slots, queries, keys, scores, to, stride, size, s16, left)


@ordered
def _score_lanes(
    pool: Any, at: int, step: int, slots: int, queries: Any, keys: Any, scores: Any, first: int,
    stride: int, size: Any, slices: Any, n: int,
) -> None:  # fmt: skip
    """Computes the scores of gathered queries, eight slots at a time."""
    dim, each = value(size), value(slices)
    for p in range(0, slots, 8):
        for k in range(8):
            if p + k + _AHEAD < slots:
                _request(pool, at + (p + k + _AHEAD) * step, size)
            _convert(pool, at + min(p + k, slots - 1) * step, size, keys, k * dim)
        for b in range(0, n, WIDTH // each):
            none = zeros(keys)
            t0, t1, t2, t3, t4, t5, t6, t7 = none, none, none, none, none, none, none, none
            for d in range(0, dim, each):
                q = load(queries, b * dim + d // each * WIDTH)
                t0 = fma(q, tile(keys, d, slices), t0)
                t1 = fma(q, tile(keys, dim + d, slices), t1)
                t2 = fma(q, tile(keys, 2 * dim + d, slices), t2)
                t3 = fma(q, tile(keys, 3 * dim + d, slices), t3)
                t4 = fma(q, tile(keys, 4 * dim + d, slices), t4)
                t5 = fma(q, tile(keys, 5 * dim + d, slices), t5)
                t6 = fma(q, tile(keys, 6 * dim + d, slices), t6)
                t7 = fma(q, tile(keys, 7 * dim + d, slices), t7)
            to = first + p * stride + b
            store(scores, to, fold(t0, slices))
            store(scores, to + stride, fold(t1, slices))
            store(scores, to + 2 * stride, fold(t2, slices))
            store(scores, to + 3 * stride, fold(t3, slices))
            store(scores, to + 4 * stride, fold(t4, slices))
            store(scores, to + 5 * stride, fold(t5, slices))
            store(scores, to + 6 * stride, fold(t6, slices))
            store(scores, to + 7 * stride, fold(t7, slices))


@ordered
def _cap(scores: Any, slots: int, lanes: int, used: int, softcap: Any) -> None:
    """Replaces scores s by ``c * tanh(s / c)``, with ``tanh(x) = 1 - 2 / (e^(2x) + 1)``."""
    cap = broadcast(softcap)
    one = div(cap, cap)
    two = add(one, one)
    for p in range(slots):
        for i in range(p * lanes, p * lanes + used, WIDTH):
            grown = exp(div(mul(two, load(scores, i)), cap))
            store(scores, i, mul(cap, sub(one, div(two, add(grown, one)))))


@ordered
def _hide(scores: Any, at: int, n: int, kv_heads: int, shared: int) -> None:
    """Hides one slot from the queries of one token."""
    for g in range(kv_heads):
        for s in range(shared):
            scores[at + g * n + s] = -np.inf


@ordered
def _weigh(scores: Any, slots: int, lanes: int, used: int, totals: Any) -> None:
    """Turns the scores of ``used`` lanes into weights, and writes their sums to ``totals``.

    Places after the last slot, up to a multiple of eight, get weight 0.
    """
    for b in range(0, used, WIDTH):
        highest, total = load(scores, b), zeros(totals)
        for p in range(1, slots):
            highest = maximum(highest, load(scores, p * lanes + b))
        for p in range(slots):
            weight = exp(sub(load(scores, p * lanes + b), highest))
            store(scores, p * lanes + b, weight)
            total = add(total, weight)
        store(totals, b, total)
        for p in range(slots, (slots + 7) // 8 * 8):
            store(scores, p * lanes + b, zeros(totals))


@ordered
def _sum(
    pool: Any, at: int, step: int, slots: int, n: int, size: Any, scores: Any, first: int,
    lanes: int, values: Any, sums: Any, exact: bool,
) -> None:  # fmt: skip
    """Computes the weighted sums of one KV head's values, ``[n, dim rounded up]``."""
    dim = value(size)
    padded = (dim + WIDTH - 1) // WIDTH * WIDTH
    for i in range(0, n * padded, WIDTH):
        store(sums, i, zeros(values))
    for p in range(0, slots, 8):
        for k in range(8):  # after the last slot, it is read again with weight 0
            if p + k + _AHEAD < slots:
                _request(pool, at + (p + k + _AHEAD) * step, size)
            _convert(pool, at + min(p + k, slots - 1) * step, size, values, k * padded)
        for q in range(n):
            i = p * lanes + first + q
            w0, w1 = broadcast(scores[i]), broadcast(scores[i + lanes])
            w2, w3 = broadcast(scores[i + 2 * lanes]), broadcast(scores[i + 3 * lanes])
            w4, w5 = broadcast(scores[i + 4 * lanes]), broadcast(scores[i + 5 * lanes])
            w6, w7 = broadcast(scores[i + 6 * lanes]), broadcast(scores[i + 7 * lanes])
            if exact:
                for d in range(0, padded, WIDTH):
                    both = fma(w0, load(values, d), load(sums, q * padded + d))
                    both = fma(w1, load(values, padded + d), both)
                    both = fma(w2, load(values, 2 * padded + d), both)
                    both = fma(w3, load(values, 3 * padded + d), both)
                    both = fma(w4, load(values, 4 * padded + d), both)
                    both = fma(w5, load(values, 5 * padded + d), both)
                    both = fma(w6, load(values, 6 * padded + d), both)
                    store(sums, q * padded + d, fma(w7, load(values, 7 * padded + d), both))
            else:
                for d in range(0, padded, WIDTH):
                    even = fma(w0, load(values, d), load(sums, q * padded + d))
                    odd = mul(w1, load(values, padded + d))
                    even = fma(w2, load(values, 2 * padded + d), even)
                    odd = fma(w3, load(values, 3 * padded + d), odd)
                    even = fma(w4, load(values, 4 * padded + d), even)
                    odd = fma(w5, load(values, 5 * padded + d), odd)
                    even = fma(w6, load(values, 6 * padded + d), even)
                    odd = fma(w7, load(values, 7 * padded + d), odd)
                    store(sums, q * padded + d, add(even, odd))


@ordered
def _scatter(
    sums: Any, totals: Any, token: int, n: int, g: int, shared: int, heads: int, size: Any, out: Any
) -> None:
    dim = value(size)
    padded = (dim + WIDTH - 1) // WIDTH * WIDTH
    for q in range(n):
        at = ((token + q // shared) * heads + g * shared + q % shared) * dim
        total, d = broadcast(totals[g * n + q]), 0
        while d + WIDTH <= dim:
            store(out, at + d, div(load(sums, q * padded + d), total))
            d += WIDTH
        while d < dim:
            out[at + d] = round_to_storage(sums[q * padded + d] / totals[g * n + q], out[0])
            d += 1


# Torch is faster for a row with at least this many queries per KV head and this much work (tokens
# times slots times the width of a query). Measured with head sizes of 32 to 128 and contexts of up
# to 900 tokens.
_MANY, _MUCH = 24, 400_000


class CompiledRows:
    """Computes attention for all rows of a step; see `RowByRow`.

    Args:
        exact: Whether the bits of a token's result must not depend on other tokens.
    """

    def __init__(self, pool: Tensor, exact: bool = False) -> None:
        self._others, self._exact = RowByRow(pool), exact
        self.all_bits = bits(pool)  # of all layers
        self._layers = [bits(layer) for layer in pool]
        self._kv_heads = pool.shape[3]
        self._scratch: Scratch | None = None
        self._query = self._out = torch.empty(0)
        self._asked = self._found = bits(self._out)

    def bits(self, layer: int) -> NDArray[Any]:
        """Returns one layer's keys and values as a flat array for compiled code."""
        return self._layers[layer]

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Sets the layout of a step."""
        self._others.begin(host, device)
        self._step = host
        self._lengths = host.trunks + host.nodes
        self._tokens = np.diff(host.query_offsets)
        self._little: Int64 | None = None
        self._much: list[int] = []

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `RowCache.attend`; the next call overwrites the result."""
        query = query.contiguous()
        self._take(query)
        scratch, little = self._prepared(query)
        if len(little):
            step, number = self._step, scratch.totals.dtype.type
            attend(
                self._asked, self._layers[layer], step.positions, step.visible_lens, step.tree,
                step.query_offsets, step.kv_starts, step.trunks, step.nodes, little,
                step.query_offsets[little], step.query_offsets[little + 1], scratch.heads,
                scratch.kv_heads, scratch.size, scratch.tokens, number(scale), window or 0,
                number(softcap or 0.0), *scratch.arrays, self._found, self._exact,
            )  # fmt: skip
        for row in self._much:
            self._others.attend_row(row, layer, query, scale, window, softcap, self._out)
        return self._out

    def _take(self, query: Tensor) -> None:
        """Sets the arrays of queries and results; usually reuses the previous layer's arrays."""
        if query is not self._query:
            if self._out.shape != query.shape:
                self._out = torch.empty_like(query)
                self._found = bits(self._out)
            self._query, self._asked = query, bits(query)

    def _prepared(self, query: Tensor) -> tuple[Scratch, Int64]:
        """Working memory, and the rows for compiled code; computed once per step."""
        _, heads, dim = query.shape
        if self._scratch is None:
            self._scratch = Scratch(heads, self._kv_heads, dim, numbers(query.dtype))
        if self._scratch.heads != heads:
            raise UnsupportedModel(
                f"layers have {self._scratch.heads} and {heads} query heads; all layers must have "
                "the same number"
            )
        if self._little is None:
            work = self._tokens * self._lengths * (heads * dim)
            much = (self._tokens * (heads // self._kv_heads) >= _MANY) & (work >= _MUCH)
            much &= not self._exact
            self._little, self._much = np.flatnonzero(~much), np.flatnonzero(much).tolist()
            self._scratch.hold(int(self._lengths[self._little].max(initial=0)))
        return self._scratch, self._little
