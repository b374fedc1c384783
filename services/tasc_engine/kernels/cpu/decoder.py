"""All layers of a Llama-like model in one compiled call; see `LeanDecoder`.

Products are of int8, bfloat16 or float32 numbers, as the type of each weight says. Threads share a
step: products are divided by outputs, and the rest by tokens. Each number is computed by the same
operations in the same order, whichever thread does it.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba.core import types
from numba.extending import overload
from numpy.typing import NDArray

from tasc_engine.kernels.cpu.attention import MAX_LANES, attend
from tasc_engine.kernels.cpu.compiling import ordered
from tasc_engine.kernels.cpu.int8 import quantise
from tasc_engine.kernels.cpu.layers import add_and_norm, apply_rope_and_write_kv, gate
from tasc_engine.kernels.cpu.products import (
    SPARE_BYTES,
    FloatWeight,
    Int8Weight,
    dot,
    fused,
    multiply,
    multiply_floats,
)
from tasc_engine.kernels.cpu.team import meet

Weight: TypeAlias = Int8Weight | FloatWeight
Elements = NDArray[Any]  # float32, or the bits of bfloat16 as uint16; see `simd`
Floats = NDArray[np.float32]
Int64 = NDArray[np.int64]


class Weights(NamedTuple):
    """The model's weights; those of each layer follow those of the layer before.

    The weights of all layers have one type.

    Attributes:
        norms: ``[(2 * layers + 1) * width]``, of the inputs of attention and of the MLP in turn,
            then of the LM head's inputs.
        head_norms: ``[layers * (heads + kv_heads) * dim]``; empty for none.
        cos_sin: See `apply_rope_and_write_kv`.
        windows: ``int64[layers]``, the sliding window of each layer; 0 for none.
    """

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    head: Weight
    norms: Floats
    head_norms: Floats
    cos_sin: Floats
    windows: Int64


class Shape(NamedTuple):
    """Numbers of the model.

    Attributes:
        eps: Epsilon of all norms.
        scale: Factor of attention scores.
    """

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
    """Working memory of one thread, and the tokens whose attention it computes; see `attend`."""

    rows: Int64
    begins: Int64
    ends: Int64
    queries: Floats
    keys: Floats
    values: Floats
    scores: Floats
    totals: Floats
    sums: Floats
    products: NDArray[np.int32]


class Sums(NamedTuple):
    """Working memory of one thread for `project`."""

    products: NDArray[np.int32]


class Rounded(NamedTuple):
    """Working memory for the rounded rows of `project`, which all threads share."""

    rounded: NDArray[np.uint8]
    scales: Floats

    @classmethod
    def of(cls, rows: int, inputs: int) -> "Rounded":
        rounded = np.zeros(rows * inputs + SPARE_BYTES, np.uint8)
        return cls(rounded, np.empty(rows, np.float32))


class Memory(NamedTuple):
    """Working memory for a number of tokens, which all threads share."""

    normed: Elements
    qkv: Elements
    query: Elements
    attended: Elements
    delta: Elements
    gate_up: Elements
    gated: Elements
    rounded: NDArray[np.uint8]
    scales: Floats

    @classmethod
    def of(cls, tokens: int, weights: Weights, shape: Shape, elements: Any) -> "Memory":
        """Allocates memory for a number of tokens.

        Args:
            elements: The numpy type of activations, which are rounded for products of int8.
        """
        width, inner = weights.out.outputs, weights.down.inputs
        heads = shape.heads * shape.dim
        most = max(width, inner, heads)

        def room(each: int) -> Elements:
            return np.empty(tokens * each, elements)

        return cls(
            normed=room(width), qkv=room(weights.qkv.outputs), query=room(heads),
            attended=room(heads), delta=room(width), gate_up=room(2 * inner), gated=room(inner),
            **Rounded.of(tokens, most)._asdict(),
        )  # fmt: skip


def _ready(x: Any, weight: Any, memory: Any, first: Any, last: Any) -> None:
    """Rounds some rows of ``x``, if their product is of int8."""


@overload(_ready, inline="always")
def _ready_for(x: Any, weight: Any, memory: Any, first: Any, last: Any) -> Any:
    # numba wants the same annotations as above
    def rounds(x: Any, weight: Any, memory: Any, first: Any, last: Any) -> None:
        begin, end = first * weight.inputs, last * weight.inputs
        quantise(x[begin:end], memory.rounded[begin:end], memory.scales[first:last])

    def does_nothing(x: Any, weight: Any, memory: Any, first: Any, last: Any) -> None:
        pass

    return rounds if weight.instance_class is Int8Weight else does_nothing


def _multiply(
    x: Any, rows: Any, weight: Any, layer: Any, memory: Any, kind: Any, own: Any, out: Any,
    part: Any, parts: Any,
) -> None:  # fmt: skip
    """Multiplies rows that are `_ready`; see `multiply` and `multiply_floats`."""


@overload(_multiply, inline="always")
def _multiply_of(
    x: Any, rows: Any, weight: Any, layer: Any, memory: Any, kind: Any, own: Any, out: Any,
    part: Any, parts: Any,
) -> Any:  # fmt: skip
    def of_integers(
        x: Any, rows: Any, weight: Any, layer: Any, memory: Any, kind: Any, own: Any, out: Any,
        part: Any, parts: Any,
    ) -> None:  # fmt: skip
        rounded, scales, sums = memory.rounded, memory.scales, own.products
        multiply(rounded, scales, rows, weight, layer, kind, sums, out, part, parts)

    def of_float32(
        x: Any, rows: Any, weight: Any, layer: Any, memory: Any, kind: Any, own: Any, out: Any,
        part: Any, parts: Any,
    ) -> None:  # fmt: skip
        multiply_floats(x, rows, weight, layer, fused(), own.products, out, part, parts)

    def of_bfloat16(
        x: Any, rows: Any, weight: Any, layer: Any, memory: Any, kind: Any, own: Any, out: Any,
        part: Any, parts: Any,
    ) -> None:  # fmt: skip
        multiply_floats(x, rows, weight, layer, dot(), own.products, out, part, parts)

    if weight.instance_class is Int8Weight:
        return of_integers
    numbers = weight.types[weight.fields.index("numbers")]
    return of_float32 if numbers.dtype == types.float32 else of_bfloat16


@ordered
def forward(
    hidden: Any, all_tokens: bool, pool: Any, weights: Any, shape: Any, size: Any, kind: Any,
    step: Any, memory: Any, logits: Any, own: Any, part: int, parts: int,
    counter: Any, target: int,
) -> None:  # fmt: skip
    """Runs all layers, and the LM head if ``logits`` is not empty.

    Its inputs ``[M * width]`` are left in ``memory.normed``.

    Args:
        hidden: ``[max(N, M) * width]`` elements, the embeddings of N tokens; overwritten.
        all_tokens: Whether the result has all N tokens; otherwise the M of ``step.picked``.
        pool: The KV cache of all layers.
        size: The `Size` of a head.
        kind: The `Size` of one of the `instructions`, for int8.
        logits: ``[M * vocab]`` elements or empty.
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
        _ready(memory.normed, weights.qkv, memory, first, last)
        target = meet(counter, target, parts)
        _multiply(memory.normed, n, weights.qkv, layer, memory, kind, own, memory.qkv, part, parts)
        target = meet(counter, target, parts)
        kv = pool[layer * layer_pool : (layer + 1) * layer_pool]
        norms = weights.head_norms[layer * of_norms : (layer + 1) * of_norms]
        apply_rope_and_write_kv(
            memory.qkv[first * pitch : last * pitch], heads, kv_heads, dim, norms, shape.eps,
            weights.cos_sin, step.positions[first:last], step.slots[first:last],
            memory.query[first * all_heads : last * all_heads], kv,
        )  # fmt: skip
        target = meet(counter, target, parts)
        attend(
            memory.query, kv, step.positions, step.visible_lens, step.tree, step.query_offsets,
            step.kv_starts, step.trunks, step.nodes, own.rows, own.begins, own.ends, heads,
            kv_heads, size, max(MAX_LANES // heads, 1), shape.scale, weights.windows[layer],
            np.float32(0), own.queries, own.keys, own.values, own.scores, own.totals, own.sums,
            memory.attended, True,
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
        _ready(attended, weights.out, memory, first, last)
        target = meet(counter, target, parts)
        _multiply(attended, n, weights.out, layer, memory, kind, own, memory.delta, part, parts)
        target = meet(counter, target, parts)
        _norm(hidden, memory, width, weights, shape, 2 * layer + 1, first, last)
        _ready(memory.normed, weights.gate_up, memory, first, last)
        target = meet(counter, target, parts)
        _multiply(
            memory.normed, n, weights.gate_up, layer, memory, kind, own, memory.gate_up, part, parts
        )
        target = meet(counter, target, parts)
        gated = memory.gated[first * inner : last * inner]
        gate(memory.gate_up[first * 2 * inner : last * 2 * inner], inner, gated)
        _ready(memory.gated, weights.down, memory, first, last)
        target = meet(counter, target, parts)
        _multiply(
            memory.gated, n, weights.down, layer, memory, kind, own, memory.delta, part, parts
        )
        target = meet(counter, target, parts)
        _norm(hidden, memory, width, weights, shape, 2 * layer + 2, first, last)
    if len(logits):
        _ready(memory.normed, weights.head, memory, first, last)
    target = meet(counter, target, parts)
    if len(logits):
        _multiply(memory.normed, n, weights.head, 0, memory, kind, own, logits, part, parts)
        meet(counter, target, parts)


@ordered
def project(
    x: Any, rows: int, weight: Any, layer: int, memory: Any, kind: Any, out: Any, own: Any,
    part: int, parts: int, counter: Any, target: int,
) -> None:  # fmt: skip
    """Computes one product.

    Args:
        x: ``[rows * inputs]`` elements.
        layer: Which of the weights.
        memory: A `Rounded`.
        out: ``[rows * outputs]`` elements, written.
        own: A `Sums`.
    """
    _ready(x, weight, memory, rows * part // parts, rows * (part + 1) // parts)
    target = meet(counter, target, parts)
    _multiply(x, rows, weight, layer, memory, kind, own, out, part, parts)
    meet(counter, target, parts)


@ordered
def _norm(
    hidden: Any, memory: Any, added: int, weights: Any, shape: Any, which: int, first: int,
    last: int,
) -> None:  # fmt: skip
    """Adds the last product, of width ``added``, to some tokens, and norms the sums."""
    width = weights.out.outputs
    begin, end = first * width, last * width
    add_and_norm(
        hidden[begin:end], memory.delta[first * added : last * added],
        weights.norms[which * width : (which + 1) * width], shape.eps, memory.normed[begin:end],
    )  # fmt: skip


@ordered
def _copy(source: Any, at: int, n: int, target: Any, to: int) -> None:
    for i in range(n):
        target[to + i] = source[at + i]
