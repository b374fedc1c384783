"""Exact products of int8 numbers: a few rows with a weight that is read once, in order.

Sixteen outputs are computed together, from four inputs at a time. `pack` lays a weight out in this
order. Sums are of int32, so no order of them changes a bit.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from tasc_engine.kernels.cpu.compiling import known, ordered
from tasc_engine.kernels.cpu.simd import (
    WIDTH,
    add,
    broadcast,
    from_integers,
    load,
    mul,
    request,
    store,
)

MOST, SHIFT = 127, 128  # greatest number; activations are stored as uint8, SHIFT above their value
SPARE_BYTES = 3  # after the last row, which may be read
MOST_INPUTS = 2**31 // (255 * MOST)  # sums of more products may not fit int32
PLAIN, VNNI_256, VNNI = range(3)  # instructions; see `instructions`
_GROUP = 4  # inputs that one instruction multiplies
_VECTORS = 3  # of outputs in a block, which with eight rows takes 24 registers of AVX-512
_COLUMNS = _VECTORS * WIDTH
_BYTES = WIDTH * _GROUP
_MOST_ROWS = 8  # of a block
_AHEAD = 3072  # bytes, from reading a weight to requesting one from memory
_one, _two, _four, _eight = (known(n) for n in (1, 2, 4, _MOST_ROWS))
_I8, _I32 = ir.IntType(8), ir.IntType(32)
_SUMS = ir.VectorType(_I32, WIDTH)


def instructions() -> tuple[int, ...]:
    """The kinds of instructions that this processor has, the fastest last.

    VNNI needs AVX-512, and VNNI_256 needs AVX. PLAIN runs on every processor, on AVX2 by products
    of int16. Only PLAIN is used if numba compiles for another processor.
    """
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return (PLAIN,)
    has = set(get_host_cpu_features().split(","))  # without those that numba does not use
    half = "+avxvnni" in has or {"+avx512vnni", "+avx512vl"} <= has
    return (PLAIN, *(VNNI_256,) * half, *(VNNI,) * ("+avx512vnni" in has))


class Int8Weight(NamedTuple):
    """The weights of one product, or those of every layer in turn, for compiled code.

    Attributes:
        numbers: ``int8``, see `pack`.
        first: ``int32``, the value that the sum of each output begins with, which takes `SHIFT` out
            of the sum.
        scales: ``float32`` of each output.
        bias: ``float32`` of each output; empty for none.
        outputs, inputs: The shape of one weight.
    """

    numbers: NDArray[np.int8]
    first: NDArray[np.int32]
    scales: NDArray[np.float32]
    bias: NDArray[np.float32]
    outputs: int
    inputs: int

    @classmethod
    def of(
        cls,
        weight: NDArray[np.int8],
        scales: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
    ) -> "Int8Weight":
        """Packs ``int8[out, in]``, numbers from -127 to 127."""
        outputs, inputs = weight.shape
        places = -(-outputs // _COLUMNS) * _COLUMNS
        first = np.zeros(places, np.int32)
        first[:outputs] = -SHIFT * weight.sum(1, dtype=np.int32)
        padded = [np.zeros(places, np.float32) for _ in (scales, bias)]
        padded[0][:outputs] = scales
        if bias is not None:
            padded[1][:outputs] = bias
        own = padded[1] if bias is not None else np.zeros(0, np.float32)
        return cls(pack(weight), first, padded[0], own, outputs, inputs)

    @classmethod
    def joined(cls, weights: "list[Int8Weight]") -> "Int8Weight":
        """The weights of all layers, which have one shape; a missing bias counts as zeros."""
        shapes = {(each.outputs, each.inputs) for each in weights}
        assert len(shapes) == 1, f"weights have the shapes {shapes}"
        biased = any(len(each.bias) for each in weights)
        numbers = _aligned(sum(len(each.numbers) for each in weights))
        np.concatenate([each.numbers for each in weights], out=numbers)
        first = np.concatenate([each.first for each in weights])
        scales = np.concatenate([each.scales for each in weights])
        biases = [
            each.bias if len(each.bias) else np.zeros_like(each.scales)
            for each in weights
            if biased
        ]
        bias = np.concatenate([np.zeros(0, np.float32), *biases])
        return cls(numbers, first, scales, bias, weights[0].outputs, weights[0].inputs)

    def unpacked(self) -> NDArray[np.int8]:
        """A copy of the ``int8[out, in]`` weight."""
        blocks, groups = len(self.first) // _COLUMNS, -(-self.inputs // _GROUP)
        parts = self.numbers.reshape(blocks, groups, _VECTORS, WIDTH, _GROUP)
        whole = parts.transpose(0, 2, 3, 1, 4).reshape(len(self.first), groups * _GROUP)
        return np.ascontiguousarray(whole[: self.outputs, : self.inputs])


def pack(weight: NDArray[np.int8]) -> NDArray[np.int8]:
    """Lays out ``int8[out, in]`` in the order of the product, filled up with zeros."""
    blocks, groups = -(-weight.shape[0] // _COLUMNS), -(-weight.shape[1] // _GROUP)
    whole = np.zeros((blocks * _COLUMNS, groups * _GROUP), np.int8)
    whole[: weight.shape[0], : weight.shape[1]] = weight
    parts = whole.reshape(blocks, _VECTORS, WIDTH, groups, _GROUP)
    found = _aligned(whole.size)
    found.reshape(blocks, groups, _VECTORS, WIDTH, _GROUP)[:] = parts.transpose(0, 3, 1, 2, 4)
    return found


def _aligned(size: int) -> NDArray[np.int8]:
    """Memory that begins with a cache line, so that no vector crosses two of them."""
    whole = np.empty(size + _BYTES, np.int8)
    begin = -whole.ctypes.data % _BYTES
    return whole[begin : begin + size]


def room_for_sums() -> NDArray[np.int32]:
    """Working memory of `multiply`."""
    return np.zeros(_MOST_ROWS * _COLUMNS, np.int32)


@ordered
def multiply(
    x: Any, row_scales: Any, rows: int, weight: Any, layer: int, kind: Any, sums: Any, out: Any,
    part: int, parts: int,
) -> None:  # fmt: skip
    """Computes the sums of integers, scaled by row and output in float32, plus the bias.

    Args:
        x: ``uint8``, ``rows * inputs`` integers from -127 to 127 plus `SHIFT`, and
            `SPARE_BYTES` of any value.
        row_scales: ``float32[rows]``.
        weight: An `Int8Weight`.
        layer: Which of the weights.
        kind: The `Size` of one of the `instructions`.
        sums: `room_for_sums`.
        out: ``float32[rows * outputs]``, written.
        part, parts: Which outputs to compute: part of so many parts.
    """
    s1, s2, s4, s8 = _one(), _two(), _four(), _eight()
    inputs, outputs = weight.inputs, weight.outputs
    groups, blocks = (inputs + _GROUP - 1) // _GROUP, (outputs + _COLUMNS - 1) // _COLUMNS
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        column = block * _COLUMNS
        at = layer * blocks * _COLUMNS + column  # of the arrays by output
        begin = at * groups * _GROUP
        width, row = min(_COLUMNS, outputs - column), 0
        while row < rows:
            left, own, n = rows - row, row * inputs, 1
            # The first rows read the block from memory, and the next ones request the next block.
            ahead = groups * _BYTES * _VECTORS if row else _AHEAD
            if left >= _MOST_ROWS:
                n = _MOST_ROWS
                _sum_block(x, own, inputs, weight, begin, groups, at, ahead, s8, kind, sums)
            elif left >= 4:
                n = 4
                _sum_block(x, own, inputs, weight, begin, groups, at, ahead, s4, kind, sums)
            elif left >= 2:
                n = 2
                _sum_block(x, own, inputs, weight, begin, groups, at, ahead, s2, kind, sums)
            else:
                _sum_block(x, own, inputs, weight, begin, groups, at, ahead, s1, kind, sums)
            for i in range(n):
                to, scale = (row + i) * outputs + column, row_scales[row + i]
                _scale(sums, i * _COLUMNS, width, weight, at, scale, out, to)
            row += n


@ordered
def _scale(
    sums: Any, begin: int, width: int, weight: Any, at: int, scale: Any, out: Any, to: int
) -> None:
    scales, bias, c = weight.scales, weight.bias, 0
    while c + WIDTH <= width:
        by_output = mul(from_integers(sums, begin + c), load(scales, at + c))
        scaled = mul(by_output, broadcast(scale))
        store(out, to + c, add(scaled, load(bias, at + c)) if len(bias) else scaled)
        c += WIDTH
    while c < width:
        one = np.float32(sums[begin + c]) * scales[at + c] * scale
        out[to + c] = one + bias[at + c] if len(bias) else one
        c += 1


@intrinsic
def _sum_block(
    _: Any, x: Any, at: Any, pitch: Any, weight: Any, begin: Any, groups: Any, column: Any,
    ahead: Any, rows: Any, kind: Any, sums: Any,
) -> Any:  # fmt: skip
    """Writes the ``sums[rows, columns]`` of one block, with all sums in registers.

    Args:
        x, at, pitch: The first row begins at ``x[at]``, and each row ``pitch`` bytes further on.
        weight, begin, groups: The block begins at ``weight.numbers[begin]``.
        column: The sums begin with ``weight.first[column:]``.
        ahead: Requests the weights this many bytes behind those that are read.
        rows, kind: Sizes.
    """
    count, chosen = rows.value, kind.value

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = args[1].type

        def data(kind: Any, value: Any, offset: Any, element: Any) -> Any:
            array = make_array(kind)(context, builder, value)
            return builder.bitcast(builder.gep(array.data, [offset]), element.as_pointer())

        def field(name: str) -> tuple[Any, Any]:
            at = weight.fields.index(name)
            return weight.types[at], builder.extract_value(args[3], at)

        def each(pointer: Any, place: Any) -> Any:
            return builder.gep(pointer, [place])

        weights = data(*field("numbers"), args[4], ir.VectorType(_I8, _BYTES))
        later = data(*field("numbers"), builder.add(args[4], args[7]), ir.VectorType(_I8, _BYTES))
        starts = data(*field("first"), args[6], _SUMS)
        out = data(sums, args[10], index(0), _SUMS)
        inputs = [
            data(x, args[0], builder.add(args[1], builder.mul(args[2], index(row))), _I32)
            for row in range(count)
        ]
        totals = [
            [cgutils.alloca_once(builder, _SUMS) for _ in range(_VECTORS)] for _ in range(count)
        ]
        for vector in range(_VECTORS):
            start = builder.load(each(starts, index(vector)), align=4)
            for row in range(count):
                builder.store(start, totals[row][vector])
        with cgutils.for_range(builder, args[5], intp=index) as loop:
            place = builder.mul(loop.index, index(_VECTORS))
            vectors = [
                builder.load(each(weights, builder.add(place, index(vector))), align=1)
                for vector in range(_VECTORS)
            ]
            for vector in range(_VECTORS):
                request(builder, each(later, builder.add(place, index(vector))))
            for row in range(count):
                four = builder.load(each(inputs[row], loop.index), align=1)
                for vector, total in zip(vectors, totals[row], strict=True):
                    more = _multiplied(builder, chosen, builder.load(total), four, vector)
                    builder.store(more, total)
        for row in range(count):
            for vector, total in enumerate(totals[row]):
                to = each(out, index(row * _VECTORS + vector))
                builder.store(builder.load(total), to, align=4)
        return context.get_dummy_value()

    integers = [types.intp] * 2
    return types.void(x, *integers, weight, *integers, *integers, rows, kind, sums), lower


def _multiplied(builder: Any, kind: int, total: Any, x: Any, weight: Any) -> Any:
    """LLVM code that adds to sixteen sums four products each.

    Args:
        x: Four uint8, in one int32.
        weight: Sixteen times four int8.
    """
    whole = list(range(WIDTH))

    def shuffled(value: Any, other: Any, order: list[int]) -> Any:
        places = ir.Constant(ir.VectorType(_I32, len(order)), order)
        return builder.shuffle_vector(value, other, places)

    def part(value: Any, order: list[int]) -> Any:
        return shuffled(value, ir.Constant(value.type, ir.Undefined), order)

    def same(value: Any, count: int) -> Any:
        first = ir.Constant(ir.VectorType(_I32, count), ir.Undefined)
        return part(builder.insert_element(first, value, _I32(0)), [0] * count)

    def vnni(total: Any, weight: Any) -> Any:
        count = total.type.count
        name = f"llvm.x86.avx512.vpdpbusd.{count * 32}"
        made = ir.FunctionType(total.type, [total.type] * 3)
        function = cgutils.get_or_insert_function(builder.module, made, name)
        return builder.call(function, [total, same(x, count), weight])

    if kind == PLAIN:
        for place in range(_GROUP):
            own = builder.sext(part(weight, list(range(place, _BYTES, _GROUP))), _SUMS)
            one = builder.and_(builder.lshr(x, _I32(8 * place)), _I32(0xFF))
            total = builder.add(total, builder.mul(own, same(one, WIDTH)))
        return total
    fours = builder.bitcast(weight, _SUMS)
    if kind == VNNI:
        return vnni(total, fours)
    low, high = (
        vnni(part(total, half), part(fours, half))
        for half in (whole[: WIDTH // 2], whole[WIDTH // 2 :])
    )
    return shuffled(low, high, whole)
