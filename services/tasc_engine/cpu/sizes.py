"""Sizes that compiled code knows when it is compiled: loops over them are laid out flat.

A size is of a type of its own, so each gets code of its own. It knows no meaning of a size.
"""

from typing import Any

from numba.core import types
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox


class SizeType(types.Type):
    """Of one size."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(name=f"Size({value})")


class Size:
    """A size as an argument of compiled code."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._numba_type_ = SizeType(value)  # where numba looks first, without a search


register_model(SizeType)(models.OpaqueModel)


@typeof_impl.register(Size)
def _type_of(size: Size, context: Any) -> SizeType:
    return size._numba_type_


@unbox(SizeType)
def _native(kind: SizeType, size: Any, c: Any) -> Any:
    return NativeValue(c.context.get_dummy_value())


@intrinsic
def value(_: Any, size: Any) -> Any:
    """The number, in compiled code."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, size.value)

    return types.intp(size), lower


def known(number: int) -> Any:
    """A function of compiled code that gives the size of a number."""
    kind = SizeType(number)

    def typed(_: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.get_dummy_value()

        return kind(), lower

    return intrinsic(typed)
