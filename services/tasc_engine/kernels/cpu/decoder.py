"""All layers of a Llama-like model with int8 weights in one compiled call; see `LeanDecoder`.

Threads share a step: products are divided by outputs, attention by rows, and the rest by tokens.
So a single row's attention runs on one thread.
Each number is computed by the same operations in the same order, whichever thread does it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_engine.kernels.cpu.attention import MAX_LANES, attend
from tasc_engine.kernels.cpu.compiling import ordered
from tasc_engine.kernels.cpu.int8 import quantise
from tasc_engine.kernels.cpu.layers import add_and_norm, apply_rope_and_write_kv, gate
from tasc_engine.kernels.cpu.products import SPARE_BYTES, Int8Weight, multiply
from tasc_engine.kernels.cpu.team import meet

Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]


class Weights(NamedTuple):
    """The model's weights; those of each layer follow those of the layer before.

    Attributes:
        norms: ``[(2 * layers + 1) * width]``, of the inputs of attention and of the MLP in turn,
            then of the LM head's inputs.
        head_norms: ``[layers * (heads + kv_heads) * dim]``; empty for none.
        cos_sin: See `apply_rope_and_write_kv`.
        windows: ``int64[layers]``, the sliding window of each layer; 0 for none.
    """

    qkv: Int8Weight
    out: Int8Weight
    gate_up: Int8Weight
    down: Int8Weight
    head: Int8Weight
    norms: Floats
    head_norms: Floats
    cos_sin: Floats
    windows: Int64


class Shape(NamedTuple):
    """Numbers of the model; ``scale`` is that of attention scores, ``eps`` that of all norms."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    eps: np.float32
    scale: np.float32


class Step(NamedTuple):
    """Fields of a `StepLayout`; ``picked`` are the indices of the tokens of the result."""

    positions: Int64
    visible_lens: Int64
    tree: Int64
    query_offsets: Int64
    kv_starts: Int64
    trunks: Int64
    nodes: Int64
    slots: Int64
    picked: Int64


class Own(NamedTuple):
    """Working memory of one thread, and the rows of the step whose attention it computes."""

    rows: Int64
    queries: Floats
    keys: Floats
    values: Floats
    scores: Floats
    totals: Floats
    sums: Floats
    products: NDArray[np.int32]


class Memory(NamedTuple):
    """Working memory for a number of tokens, which all threads share."""

    normed: Floats
    rounded: NDArray[np.uint8]
    scales: Floats
    qkv: Floats
    query: Floats
    attended: Floats
    delta: Floats
    gate_up: Floats
    gated: Floats

    @classmethod
    def of(cls, tokens: int, weights: Weights, shape: Shape) -> "Memory":
        width, inner = weights.out.outputs, weights.down.inputs
        heads = shape.heads * shape.dim
        most = max(width, inner, heads)

        def floats(each: int) -> Floats:
            return np.empty(tokens * each, np.float32)

        return cls(
            normed=floats(width), scales=floats(1),
            rounded=np.zeros(tokens * most + SPARE_BYTES, np.uint8),
            qkv=floats(weights.qkv.outputs), query=floats(heads), attended=floats(heads),
            delta=floats(width), gate_up=floats(2 * inner), gated=floats(inner),
        )  # fmt: skip


@ordered
def forward(
    hidden: Any, all_tokens: bool, pool: Any, weights: Any, shape: Any, size: Any, kind: Any,
    step: Any, memory: Any, logits: Any, own: Any, part: int, parts: int,
    counter: Any, target: int,
) -> None:  # fmt: skip
    """Runs all layers, and the LM head if ``logits`` is not empty.

    Its inputs ``[M * width]`` are left in ``memory.normed``.

    Args:
        hidden: ``float32[max(N, M) * width]``, the embeddings of N tokens; overwritten.
        all_tokens: Whether the result has all N tokens; otherwise the M of ``step.picked``.
        pool: The KV cache of all layers; for its element type, see `simd`.
        size: The `Size` of a head.
        kind: The `Size` of one of the `instructions`.
        logits: ``float32[M * vocab]`` or empty.
        part, parts, counter, target: See `Team`.
    """
    n = len(step.positions)
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    width, all_heads, inner = weights.out.outputs, heads * dim, weights.down.inputs
    pitch, of_norms = (heads + 2 * kv_heads) * dim, (heads + kv_heads) * dim
    if not len(weights.head_norms):
        of_norms = 0
    layer_pool = len(pool) // shape.layers
    first, last = n * part // parts, n * (part + 1) // parts
    _norm(hidden, memory, 0, weights, shape, 0, first, last)
    for layer in range(shape.layers):
        target = meet(counter, target, parts)
        _multiply(memory, n, weights.qkv, layer, kind, own, memory.qkv, part, parts)
        target = meet(counter, target, parts)
        kv = pool[layer * layer_pool : (layer + 1) * layer_pool]
        norms = weights.head_norms[layer * of_norms : (layer + 1) * of_norms]
        for row in own.rows:
            begin, end = step.query_offsets[row], step.query_offsets[row + 1]
            apply_rope_and_write_kv(
                memory.qkv[begin * pitch : end * pitch], heads, kv_heads, dim, norms, shape.eps,
                weights.cos_sin, step.positions[begin:end], step.slots[begin:end],
                memory.query[begin * all_heads : end * all_heads], kv,
            )  # fmt: skip
        attend(
            memory.query, kv, step.positions, step.visible_lens, step.tree, step.query_offsets,
            step.kv_starts, step.trunks, step.nodes, own.rows, heads, kv_heads, size,
            max(MAX_LANES // heads, 1), shape.scale, weights.windows[layer], np.float32(0),
            own.queries, own.keys, own.values, own.scores, own.totals, own.sums, memory.attended,
            True,
        )  # fmt: skip
        target = meet(counter, target, parts)
        attended = memory.attended
        if layer == shape.layers - 1 and not all_tokens:  # the others are not needed from here on
            n = len(step.picked)
            first, last = n * part // parts, n * (part + 1) // parts
            for i in range(first, last):
                at = step.picked[i]
                _copy(memory.attended, at * all_heads, all_heads, memory.query, i * all_heads)
                _copy(hidden, at * width, width, memory.delta, i * width)
            target = meet(counter, target, parts)
            _copy(memory.delta, first * width, (last - first) * width, hidden, first * width)
            attended = memory.query
        _round(attended, all_heads, memory, first, last)
        target = meet(counter, target, parts)
        _multiply(memory, n, weights.out, layer, kind, own, memory.delta, part, parts)
        target = meet(counter, target, parts)
        _norm(hidden, memory, width, weights, shape, 2 * layer + 1, first, last)
        target = meet(counter, target, parts)
        _multiply(memory, n, weights.gate_up, layer, kind, own, memory.gate_up, part, parts)
        target = meet(counter, target, parts)
        gated = memory.gated[first * inner : last * inner]
        gate(memory.gate_up[first * 2 * inner : last * 2 * inner], inner, gated)
        _round(memory.gated, inner, memory, first, last)
        target = meet(counter, target, parts)
        _multiply(memory, n, weights.down, layer, kind, own, memory.delta, part, parts)
        target = meet(counter, target, parts)
        _norm(hidden, memory, width, weights, shape, 2 * layer + 2, first, last)
    target = meet(counter, target, parts)
    if len(logits):
        _multiply(memory, n, weights.head, 0, kind, own, logits, part, parts)
        meet(counter, target, parts)


@ordered
def _multiply(
    memory: Any, rows: int, weight: Any, layer: int, kind: Any, own: Any, out: Any, part: int,
    parts: int,
) -> None:  # fmt: skip
    """Multiplies the rounded rows in memory; see `multiply`."""
    rounded, scales, sums = memory.rounded, memory.scales, own.products
    multiply(rounded, scales, rows, weight, layer, kind, sums, out, part, parts)


@ordered
def project(
    x: Any, weight: Any, kind: Any, rounded: Any, scales: Any, out: Any, products: Any, part: int,
    parts: int, counter: Any, target: int,
) -> None:  # fmt: skip
    """Computes one product of float32 rows.

    Args:
        x: ``float32[N * inputs]``.
        rounded, scales: Working memory; see `Memory`.
        out: ``float32[N * outputs]``, written.
    """
    n = len(scales)
    first, last = n * part // parts, n * (part + 1) // parts
    _round_to(x, weight.inputs, rounded, scales, first, last)
    target = meet(counter, target, parts)
    multiply(rounded, scales, n, weight, 0, kind, products, out, part, parts)
    meet(counter, target, parts)


@ordered
def _norm(
    hidden: Any, memory: Any, added: int, weights: Any, shape: Any, which: int, first: int,
    last: int,
) -> None:  # fmt: skip
    """Adds the last product, of width ``added``, to some tokens; norms and rounds the sums."""
    width = weights.out.outputs
    begin, end = first * width, last * width
    add_and_norm(
        hidden[begin:end], memory.delta[first * added : last * added],
        weights.norms[which * width : (which + 1) * width], shape.eps, memory.normed[begin:end],
    )  # fmt: skip
    _round(memory.normed, width, memory, first, last)


@ordered
def _round(x: Any, width: int, memory: Any, first: int, last: int) -> None:
    _round_to(x, width, memory.rounded, memory.scales, first, last)


@ordered
def _round_to(x: Any, width: int, rounded: Any, scales: Any, first: int, last: int) -> None:
    begin, end = first * width, last * width
    quantise(x[begin:end], rounded[begin:end], scales[first:last])


@ordered
def _copy(source: Any, at: int, n: int, target: Any, to: int) -> None:
    for i in range(n):
        target[to + i] = source[at + i]
