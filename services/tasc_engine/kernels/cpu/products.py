"""Products of a few rows with a weight that is read once, in order.

Sixteen outputs are computed together, from four bytes of inputs at a time: four int8 numbers, two
of bfloat16 or one of float32. `pack` lays a weight out in this order. Sums of int8 products are of
int32, so no order of them changes a bit.
"""

from collections.abc import Iterable
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
    round_to_storage,
    store,
)

MOST, SHIFT = 127, 128  # greatest number; activations are stored as uint8, SHIFT above their value
SPARE_BYTES = 3  # after the last row, which may be read
MOST_INPUTS = 2**31 // (255 * MOST)  # sums of more products may not fit int32
PLAIN, VNNI_256, VNNI, _FMA, _DOT = range(5)  # instructions; the last two are for floats
_UNIT = 4  # bytes of inputs that one instruction multiplies
_VECTORS = 3  # of outputs in a block, which with eight rows takes 24 registers of AVX-512
_COLUMNS = _VECTORS * WIDTH
_BYTES = WIDTH * _UNIT
_MOST_ROWS = 8  # of a block
_AHEAD = 3072  # bytes, from reading a weight to requesting one from memory
_one, _two, _four, _eight = (known(n) for n in (1, 2, 4, _MOST_ROWS))
_I8, _I32, _F32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_SUMS, _FLOAT_SUMS = ir.VectorType(_I32, WIDTH), ir.VectorType(_F32, WIDTH)


def instructions() -> tuple[int, ...]:
    """The kinds of instructions for int8 that this processor has, the fastest last.

    VNNI needs AVX-512, and VNNI_256 needs AVX. PLAIN runs on every processor, on AVX2 by products
    of int16. Only PLAIN is used if numba compiles for another processor.
    """
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return (PLAIN,)
    has = set(get_host_cpu_features().split(","))  # without those that numba does not use
    half = "+avxvnni" in has or {"+avx512vnni", "+avx512vl"} <= has
    return (PLAIN, *(VNNI_256,) * half, *(VNNI,) * ("+avx512vnni" in has))


def multiplies(itemsize: int) -> bool:
    """Whether this processor has the instructions of `multiply_floats`.

    Args:
        itemsize: Bytes of a number: 2 for bfloat16, 4 for float32.
    """
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return False
    needed = {2: "+avx512bf16", 4: "+avx512f"}[itemsize]
    return needed in get_host_cpu_features().split(",")


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
        first = _padded(-SHIFT * weight.sum(1, dtype=np.int32))
        own = np.zeros(0, np.float32) if bias is None else _padded(bias)
        return cls(pack(weight), first, _padded(scales), own, *weight.shape)

    @classmethod
    def joined(cls, weights: "list[Int8Weight]") -> "Int8Weight":
        """The weights of all layers, which have one shape; a missing bias counts as zeros."""
        shapes = {(each.outputs, each.inputs) for each in weights}
        assert len(shapes) == 1, f"weights have the shapes {shapes}"
        biased = any(len(each.bias) for each in weights)
        numbers = _joined([each.numbers for each in weights])
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
        return unpack(self.numbers, self.outputs, self.inputs)


class FloatWeight(NamedTuple):
    """The weights of one product, or those of every layer in turn, for compiled code.

    Attributes:
        numbers: ``float32``, or the bits of bfloat16 as ``uint16``, see `pack`.
        first: ``float32``, the value that the sum of each output begins with: the bias.
        outputs, inputs: The shape of one weight. bfloat16 needs an even number of inputs.
    """

    numbers: NDArray[Any]
    first: NDArray[np.float32]
    outputs: int
    inputs: int

    @classmethod
    def of(
        cls, count: int, layers: Iterable[tuple[NDArray[Any], NDArray[np.float32] | None]]
    ) -> "FloatWeight":
        """Packs the ``[out, in]`` weights, of one shape, and the biases of ``count`` layers."""
        found: FloatWeight | None = None
        for layer, (weight, bias) in enumerate(layers):
            first = _padded(np.zeros(len(weight), np.float32) if bias is None else bias)
            size = packed_size(weight)
            if found is None:
                room = _aligned(count * size, weight.dtype)
                found = cls(room, np.empty(count * len(first), np.float32), *weight.shape)
            assert (found.outputs, found.inputs) == weight.shape, f"a weight has {weight.shape}"
            assert weight.shape[1] * weight.itemsize % _UNIT == 0, f"a weight has {weight.shape}"
            pack(weight, found.numbers[layer * size : (layer + 1) * size])
            found.first[layer * len(first) :][: len(first)] = first
        assert found is not None, "a product has a layer"
        return found

    def unpacked(self) -> NDArray[Any]:
        """A copy of the ``[out, in]`` weight; this is of one layer."""
        return unpack(self.numbers, self.outputs, self.inputs)


def packed_size(weight: NDArray[Any]) -> int:
    """Number of elements that `pack` makes of ``[out, in]``."""
    blocks, group = -(-weight.shape[0] // _COLUMNS), _UNIT // weight.itemsize
    return blocks * _COLUMNS * -(-weight.shape[1] // group) * group


def pack(weight: NDArray[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Lays out ``[out, in]`` in the order of the product, filled up with zeros.

    Args:
        out: Receives the result, `packed_size` elements; None for a new array.
    """
    found = _aligned(packed_size(weight), weight.dtype) if out is None else out
    group = _UNIT // weight.itemsize
    groups = -(-weight.shape[1] // group)
    for block, part in enumerate(found.reshape(-1, groups, _VECTORS, WIDTH, group)):
        rows = weight[block * _COLUMNS : (block + 1) * _COLUMNS]
        missing = _COLUMNS - len(rows), groups * group - rows.shape[1]
        if any(missing):
            rows = np.pad(rows, [(0, each) for each in missing])
        part[:] = rows.reshape(_VECTORS, WIDTH, groups, group).transpose(2, 0, 1, 3)
    return found


def unpack(numbers: NDArray[Any], outputs: int, inputs: int) -> NDArray[Any]:
    """The inverse of `pack`."""
    group = _UNIT // numbers.itemsize
    blocks, groups = -(-outputs // _COLUMNS), -(-inputs // group)
    parts = numbers.reshape(blocks, groups, _VECTORS, WIDTH, group)
    whole = parts.transpose(0, 2, 3, 1, 4).reshape(blocks * _COLUMNS, groups * group)
    return np.ascontiguousarray(whole[:outputs, :inputs])


def _padded(values: NDArray[Any]) -> NDArray[Any]:
    """Values of outputs, with zeros up to whole blocks."""
    found = np.zeros(-(-len(values) // _COLUMNS) * _COLUMNS, values.dtype)
    found[: len(values)] = values
    return found


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts, out=_aligned(sum(map(len, parts)), parts[0].dtype))


def _aligned(size: int, kind: Any) -> NDArray[Any]:
    """Memory that begins with a cache line, so that no vector crosses two of them."""
    each = np.dtype(kind).itemsize
    whole = np.empty(size + _BYTES // each, kind)
    begin = -whole.ctypes.data % _BYTES // each
    return whole[begin : begin + size]


def room_for_sums() -> NDArray[np.int32]:
    """Working memory of `multiply` and `multiply_floats`."""
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
    inputs, outputs = weight.inputs, weight.outputs
    blocks = (outputs + _COLUMNS - 1) // _COLUMNS
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        column, row = block * _COLUMNS, 0
        at = layer * blocks * _COLUMNS + column  # of the arrays by output
        width = min(_COLUMNS, outputs - column)
        while row < rows:
            n = _sum_rows(x, row, rows, inputs, weight, at, kind, sums)
            for i in range(n):
                to, scale = (row + i) * outputs + column, row_scales[row + i]
                _scale(sums, i * _COLUMNS, width, weight, at, scale, out, to)
            row += n


@ordered
def multiply_floats(
    x: Any, rows: int, weight: Any, layer: int, kind: Any, sums: Any, out: Any, part: int,
    parts: int,
) -> None:  # fmt: skip
    """Computes ``x @ weight.T + bias`` with sums in float32, rounded once.

    Args:
        x: ``rows * inputs`` elements.
        weight: A `FloatWeight`.
        layer: Which of the weights.
        kind: `fused` for float32, and `dot` for bfloat16.
        sums: `room_for_sums`.
        out: ``rows * outputs`` elements, written.
        part, parts: Which outputs to compute: part of so many parts.
    """
    inputs, outputs, found = weight.inputs, weight.outputs, sums.view(np.float32)
    blocks = (outputs + _COLUMNS - 1) // _COLUMNS
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        column, row = block * _COLUMNS, 0
        at = layer * blocks * _COLUMNS + column
        width = min(_COLUMNS, outputs - column)
        while row < rows:
            n = _sum_rows(x, row, rows, inputs, weight, at, kind, found)
            for i in range(n):
                to, c = (row + i) * outputs + column, 0
                while c + WIDTH <= width:
                    store(out, to + c, load(found, i * _COLUMNS + c))
                    c += WIDTH
                while c < width:
                    out[to + c] = round_to_storage(found[i * _COLUMNS + c], out[0])
                    c += 1
            row += n


fused, dot = known(_FMA), known(_DOT)


@ordered
def _sum_rows(
    x: Any, row: int, rows: int, inputs: int, weight: Any, at: int, kind: Any, sums: Any
) -> int:
    """Sums a block for as many rows as fit, from a row on; returns their number."""
    s1, s2, s4, s8 = _one(), _two(), _four(), _eight()
    group = _UNIT // weight.numbers.itemsize
    groups, left, begin = (inputs + group - 1) // group, rows - row, row * inputs
    # The first rows read the block from memory, and the next ones request the next block.
    ahead = groups * _BYTES * _VECTORS if row else _AHEAD
    if left >= _MOST_ROWS:
        _sum_block(x, begin, inputs, weight, groups, at, ahead, s8, kind, sums)
        return _MOST_ROWS
    if left >= 4:
        _sum_block(x, begin, inputs, weight, groups, at, ahead, s4, kind, sums)
        return 4
    if left >= 2:
        _sum_block(x, begin, inputs, weight, groups, at, ahead, s2, kind, sums)
        return 2
    _sum_block(x, begin, inputs, weight, groups, at, ahead, s1, kind, sums)
    return 1


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
    _: Any, x: Any, at: Any, pitch: Any, weight: Any, groups: Any, column: Any, ahead: Any,
    rows: Any, kind: Any, sums: Any,
) -> Any:  # fmt: skip
    """Writes the ``sums[rows, columns]`` of one block, with all sums in registers.

    Args:
        x, at, pitch: The first row begins at ``x[at]``, and each row ``pitch`` elements further on.
        weight, groups: An output has so many units of `_UNIT` bytes.
        column: The sums begin with ``weight.first[column:]``.
        ahead: Requests the weights this many bytes behind those that are read.
        rows, kind: Sizes.
    """
    count, chosen = rows.value, kind.value
    names = "x", "at", "pitch", "weight", "groups", "column", "ahead", "rows", "kind", "sums"
    totals_of = _FLOAT_SUMS if chosen in (_FMA, _DOT) else _SUMS

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        index = args[1].type
        given = dict(zip(names, args, strict=True))

        def data(kind: Any, value: Any, element: Any) -> Any:
            array = make_array(kind)(context, builder, value)
            return builder.bitcast(array.data, element.as_pointer())

        def field(name: str, element: Any) -> Any:
            at = weight.fields.index(name)
            return data(weight.types[at], builder.extract_value(given["weight"], at), element)

        def each(pointer: Any, place: Any) -> Any:
            return builder.gep(pointer, [place])

        unit = ir.VectorType(_I8, _BYTES)
        begin = builder.mul(builder.udiv(given["column"], index(WIDTH)), given["groups"])
        weights = each(field("numbers", unit), begin)
        later = builder.bitcast(weights, _I8.as_pointer())
        later = builder.bitcast(each(later, given["ahead"]), unit.as_pointer())
        starts = builder.bitcast(
            each(field("first", totals_of.element), given["column"]), totals_of.as_pointer()
        )
        out = data(sums, given["sums"], totals_of)
        elements = data(x, given["x"], context.get_data_type(x.dtype))
        inputs = [
            builder.bitcast(
                each(elements, builder.add(given["at"], builder.mul(given["pitch"], index(row)))),
                _I32.as_pointer(),
            )
            for row in range(count)
        ]
        totals = [
            [cgutils.alloca_once(builder, totals_of) for _ in range(_VECTORS)] for _ in range(count)
        ]
        for vector in range(_VECTORS):
            start = builder.load(each(starts, index(vector)), align=4)
            for row in range(count):
                builder.store(start, totals[row][vector])
        with cgutils.for_range(builder, given["groups"], intp=index) as loop:
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
    return types.void(x, *integers, weight, *integers, types.intp, rows, kind, sums), lower


def _multiplied(builder: Any, kind: int, total: Any, x: Any, weight: Any) -> Any:
    """LLVM code that adds to sixteen sums the products of one unit each.

    Args:
        x: The inputs of a unit, as int32.
        weight: The bytes of sixteen units.
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

    def called(name: str, *given: Any) -> Any:
        made = ir.FunctionType(given[0].type, [each.type for each in given])
        return builder.call(cgutils.get_or_insert_function(builder.module, made, name), given)

    def vnni(total: Any, weight: Any) -> Any:
        count = total.type.count
        return called(f"llvm.x86.avx512.vpdpbusd.{count * 32}", total, same(x, count), weight)

    if kind == PLAIN:
        for place in range(_UNIT):
            own = builder.sext(part(weight, list(range(place, _BYTES, _UNIT))), _SUMS)
            one = builder.and_(builder.lshr(x, _I32(8 * place)), _I32(0xFF))
            total = builder.add(total, builder.mul(own, same(one, WIDTH)))
        return total
    units = builder.bitcast(weight, _SUMS)
    if kind == _DOT:
        return called("llvm.x86.avx512bf16.dpbf16ps.512", total, same(x, WIDTH), units)
    if kind == _FMA:
        inputs, weights = (builder.bitcast(v, _FLOAT_SUMS) for v in (same(x, WIDTH), units))
        return called("llvm.fma.v16f32", inputs, weights, total)
    if kind == VNNI:
        return vnni(total, units)
    low, high = (
        vnni(part(total, half), part(units, half))
        for half in (whole[: WIDTH // 2], whole[WIDTH // 2 :])
    )
    return shuffled(low, high, whole)
