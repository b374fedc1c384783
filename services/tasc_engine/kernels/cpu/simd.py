"""Sixteen numbers in one value, for compiled code: explicit vectors.

LLVM splits a vector into the processor's registers (one of AVX-512, two of AVX2, four of NEON).
Without explicit vectors, loops over arrays that might overlap stay scalar, at a tenth of the speed.
The elements of arrays are float32 or float64, or the bits of bfloat16 as uint16 and of float16 as
int16. Lanes are float32 or float64.
"""

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

WIDTH = 16
_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_FLOATS = (types.float32, types.float64)


class Lanes(types.Type):
    """The numba type of sixteen numbers of a float type."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(name=f"Lanes({of})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, _vector(kind.of))


def _vector(of: Any) -> Any:
    return ir.VectorType(_F64 if of == types.float64 else _F32, WIDTH)


def _of(array: Any) -> Any:
    """The type of lanes for an array's elements."""
    return types.float64 if array.dtype == types.float64 else types.float32


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _some(element: Any, count: int) -> Any:
    """The LLVM type of ``count`` elements; a single element is not a vector."""
    return element if count == 1 else ir.VectorType(element, count)


def _call(
    builder: Any, name: str, kind: Any, arguments: list[Any], result: Any = None, fast: Any = ()
) -> Any:
    full = f"llvm.{name}.v{WIDTH}{'f64' if kind.element == _F64 else 'f32'}"
    made = ir.FunctionType(result or kind, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, made, full)
    return builder.call(function, arguments, fastmath=fast)


def _widened(builder: Any, bits: Any, of: Any, count: int = WIDTH) -> Any:
    """LLVM code that converts ``count`` elements to the type of lanes."""
    if of in _FLOATS:
        return bits
    if of == types.int16:
        half = builder.bitcast(bits, _some(_F16, count))
        return builder.fpext(half, _some(_F32, count))
    whole = _some(_I32, count)
    high = builder.shl(builder.zext(bits, whole), _all(whole, 16))
    return builder.bitcast(high, _some(_F32, count))


def _narrowed(builder: Any, value: Any, of: Any, count: int = WIDTH) -> Any:
    """LLVM code that rounds ``count`` lanes to elements: to the nearest, ties to even."""
    if of in _FLOATS:
        return value
    short, whole = _some(_I16, count), _some(_I32, count)
    if of == types.int16:
        return builder.bitcast(builder.fptrunc(value, _some(_F16, count)), short)
    bits = builder.bitcast(value, whole)
    odd = builder.and_(builder.lshr(bits, _all(whole, 16)), _all(whole, 1))
    rounded = builder.add(bits, builder.add(odd, _all(whole, 0x7FFF)))
    # Rounding would turn some NaNs into infinity.
    quiet = builder.or_(bits, _all(whole, 1 << 22))
    no_number = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(no_number, quiet, rounded)
    return builder.trunc(builder.lshr(kept, _all(whole, 16)), short)


def _place(
    context: Any, builder: Any, kind: Any, array: Any, index: Any, count: int = WIDTH
) -> tuple[Any, int]:
    element = context.get_data_type(kind.dtype)
    data = make_array(kind)(context, builder, array).data
    where = builder.gep(data, [index])
    vector = ir.VectorType(element, count).as_pointer()
    return builder.bitcast(where, vector), context.get_abi_sizeof(element)


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """Loads lanes from a flat array, starting at an index."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where, size = _place(context, builder, array, *args)
        return _widened(builder, builder.load(where, align=size), array.dtype)

    return Lanes(_of(array))(array, types.intp), lower


def request(builder: Any, pointer: Any) -> None:
    """LLVM code that requests a cache line, for reading."""
    byte = builder.bitcast(pointer, _I8.as_pointer())
    made = ir.FunctionType(ir.VoidType(), [byte.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, made, "llvm.prefetch.p0i8")
    builder.call(function, [byte, _I32(0), _I32(3), _I32(1)])


@intrinsic
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Requests the cache line of an element, which need not be within the array."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(array)(context, builder, args[0]).data
        request(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), lower


@intrinsic
def tile(_: Any, array: Any, index: Any, size: Any) -> Any:
    """Repeats ``size`` elements of a flat array, from an index on, to fill the lanes."""
    few = size.value

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where, each = _place(context, builder, array, args[0], args[1], few)
        loaded = builder.load(where, align=each)
        again = ir.Constant(ir.VectorType(_I32, WIDTH), [i % few for i in range(WIDTH)])
        none = ir.Constant(loaded.type, ir.Undefined)
        return _widened(builder, builder.shuffle_vector(loaded, none, again), array.dtype)

    return Lanes(_of(array))(array, types.intp, size), lower


@intrinsic
def fold(_: Any, x: Any, size: Any) -> Any:
    """Sums each run of ``size`` adjacent lanes; the sums fill the lanes in order, repeatedly."""
    kind, few = _vector(x.of), size.value

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value, _), none = args, ir.Constant(kind, ir.Undefined)

        def shuffled(order: list[int]) -> Any:
            places = ir.Constant(ir.VectorType(_I32, WIDTH), order)
            return builder.shuffle_vector(value, none, places)

        step = few // 2
        while step:
            value = builder.fadd(value, shuffled([i ^ step for i in range(WIDTH)]))
            step //= 2
        return shuffled([i * few % WIDTH for i in range(WIDTH)])

    return x(x, size), lower


@intrinsic
def store(_: Any, array: Any, index: Any, value: Any) -> Any:
    """Stores lanes into a flat array, starting at an index."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where, size = _place(context, builder, array, args[0], args[1])
        builder.store(_narrowed(builder, args[2], array.dtype), where, align=size)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), lower


@intrinsic
def store_shifted(_: Any, array: Any, index: Any, x: Any) -> Any:
    """Rounds lanes from -128 to 127 to integers, ties to even, and stores 128 more as uint8."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = _call(builder, "rint", _vector(x.of), [args[2]])
        integers = builder.fptosi(whole, ir.VectorType(_I32, WIDTH))
        integers = builder.add(integers, _all(integers.type, 128))
        where, size = _place(context, builder, array, args[0], args[1])
        builder.store(builder.trunc(integers, ir.VectorType(_I8, WIDTH)), where, align=size)
        return context.get_dummy_value()

    return types.void(array, types.intp, x), lower


@intrinsic
def from_integers(_: Any, array: Any, index: Any) -> Any:
    """Lanes of float32 from a flat array of int32, starting at an index."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where, size = _place(context, builder, array, *args)
        return builder.sitofp(builder.load(where, align=size), _vector(types.float32))

    return Lanes(types.float32)(array, types.intp), lower


@intrinsic
def zeros(_: Any, array: Any) -> Any:
    """Zeros in all lanes, which have the type for an array's elements."""
    kind = Lanes(_of(array))

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _all(_vector(kind.of), 0.0)

    return kind(array), lower


@intrinsic
def broadcast(_: Any, value: Any) -> Any:
    """Lanes that all hold one number."""
    kind = _vector(value)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        none = ir.Constant(kind, ir.Undefined)
        first = builder.insert_element(none, args[0], _I32(0))
        return builder.shuffle_vector(first, none, _all(ir.VectorType(_I32, WIDTH), 0))

    return Lanes(value)(value), lower


def _binary(name: str) -> Any:
    def typed(_: Any, x: Any, y: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args)

        return x(x, y), lower

    return intrinsic(typed)


add, sub, mul, div = (_binary(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
    """``x * y + z``."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "fma", _vector(x.of), list(args))

    return x(x, y, z), lower


@intrinsic
def maximum(_: Any, x: Any, y: Any) -> Any:
    """The greater of each pair; NaN if one of them is NaN."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "maximum", _vector(x.of), list(args))

    return x(x, y), lower


@intrinsic
def absolute(_: Any, x: Any) -> Any:
    """The absolute values of the lanes."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "fabs", _vector(x.of), list(args))

    return x(x), lower


@intrinsic
def finite(_: Any, x: Any) -> Any:
    """The lanes with 0 in place of infinities and NaNs."""
    kind = _vector(x.of)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = _call(builder, "fabs", kind, list(args))
        inside = builder.fcmp_ordered("<", size, _all(kind, math.inf))
        return builder.select(inside, args[0], _all(kind, 0.0))

    return x(x), lower


@intrinsic
def double(_: Any, x: Any) -> Any:
    """The same numbers as float64."""
    kind = Lanes(types.float64)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0] if x == kind else builder.fpext(args[0], _vector(types.float64))

    return kind(x), lower


@intrinsic
def only(_: Any, x: Any, bits: Any) -> Any:
    """The lanes whose bit in an integer is set; minus infinity in the other lanes."""
    kind = _vector(x.of)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        some = builder.bitcast(builder.trunc(args[1], _I16), ir.VectorType(ir.IntType(1), WIDTH))
        return builder.select(some, args[0], _all(kind, -math.inf))

    return x(x, bits), lower


@intrinsic
def greatest(_: Any, x: Any) -> Any:
    """The greatest of all lanes; NaN if one of them is NaN."""
    kind = _vector(x.of)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "vector.reduce.fmaximum", kind, list(args), kind.element)

    return x.of(x), lower


@intrinsic
def total(_: Any, x: Any) -> Any:
    """The sum of all lanes, added in any order."""
    kind = _vector(x.of)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        terms = [kind.element(0.0), args[0]]
        return _call(builder, "vector.reduce.fadd", kind, terms, kind.element, ("reassoc",))

    return x.of(x), lower


@intrinsic
def exp(_: Any, x: Any) -> Any:
    """e to the power of each lane; 0 for lanes up to -87, e^87 from 87 on (708 in float64)."""
    kind, limit = _vector(x.of), (708.0 if x.of == types.float64 else 87.0)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = _all(kind, -limit), _all(kind, limit)
        above = builder.fcmp_ordered(">", args[0], low)  # false for NaN
        value = builder.select(above, args[0], low)
        value = builder.select(builder.fcmp_ordered("<", value, high), value, high)
        found = builder.select(above, _exponential(builder, value, kind), _all(kind, 0.0))
        no_number = builder.fcmp_unordered("uno", *args, *args)
        return builder.select(no_number, args[0], found)

    return x(x), lower


def _exponential(builder: Any, value: Any, kind: Any) -> Any:
    """Computes e^x as 2^n e^r with ``|r| <= ln 2 / 2``, and e^r by its Taylor series."""
    double = kind.element == _F64
    # ln 2 in two parts; the first has so few bits that its product with n is exact.
    terms, high, low = 7, 0.693145751953125, 1.4286068203094172e-06
    if double:
        terms, high, low = 13, 0.6931471824645996, -1.904654299957768e-09

    def fused(*arguments: Any) -> Any:
        return _call(builder, "fma", kind, list(arguments))

    n = _call(builder, "rint", kind, [builder.fmul(value, _all(kind, 1 / math.log(2)))])
    rest = fused(n, _all(kind, -high), value)
    rest = fused(n, _all(kind, -low), rest)
    series = _all(kind, 1 / math.factorial(terms))
    for k in reversed(range(terms)):
        series = fused(series, rest, _all(kind, 1 / math.factorial(k)))
    whole, bias, mantissa = (_I64, 1023, 52) if double else (_I32, 127, 23)
    integers = ir.VectorType(whole, WIDTH)
    power = builder.add(builder.fptosi(n, integers), _all(integers, bias))
    return builder.fmul(series, builder.bitcast(builder.shl(power, _all(integers, mantissa)), kind))


@intrinsic
def to_float32(_: Any, bits: Any) -> Any:
    """An array's element as a float32 number; float64 stays float64."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _widened(builder, args[0], bits, 1)

    return (bits if bits in _FLOATS else types.float32)(bits), lower


@intrinsic
def round_to_storage(_: Any, value: Any, like: Any) -> Any:
    """A number, rounded to the element type of ``like``."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _narrowed(builder, args[0], like, 1)

    return like(value, like), lower
