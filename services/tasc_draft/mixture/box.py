"""One address of all that compiled code works on, with fields by name. It owns no memory.

A call passes one address, not fifty arrays. Numba's own way to do so (structref) counts references
with atomic operations each time a field is named, which takes longer than drafting itself; a box
borrows its arrays, and whoever made it keeps them alive as long as the box.
"""

from typing import Any

import numpy as np
from numba.core import types
from numba.core.imputils import impl_ret_borrowed, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import (
    NativeValue,
    intrinsic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

from tasc_draft.compiled import borrowing


class BoxType(types.Type):
    """Of a box: the names and numba types of its fields."""

    def __init__(self, names: tuple[str, ...], payload: Any) -> None:
        self.names, self.payload = names, payload
        super().__init__(name=f"Box({', '.join(names)}; {payload})")


class Box:
    """Arrays and tuples of arrays, by name, for compiled code alone.

    Args:
        fields: What each name stands for; kept, so that the arrays live as long as the box.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = tuple(fields.values())
        self._memory = np.zeros(_size(self._fields) // 8, np.uint64)
        self.address = self._memory.ctypes.data
        _fill(self.address, self._fields)
        self.numba_type = BoxType(tuple(fields), _payload(self._fields))


def _payload(fields: tuple[Any, ...]) -> Any:
    kinds = [typeof_impl(field, None) for field in fields]
    return types.Tuple(kinds)  # type: ignore[attr-defined]


@typeof_impl.register(Box)
def _type_of(box: Box, context: Any) -> BoxType:
    return box.numba_type


register_model(BoxType)(models.OpaqueModel)


@unbox(BoxType)
def _address_of(kind: BoxType, box: Any, c: Any) -> Any:
    address = c.pyapi.object_getattr_string(box, "address")
    value = c.pyapi.long_as_voidptr(address)
    c.pyapi.decref(address)
    return NativeValue(value, is_error=c.pyapi.c_api_error())


@infer_getattr
class _Fields(AttributeTemplate):
    key = BoxType

    def generic_resolve(self, box: BoxType, name: str) -> Any:
        return box.payload[box.names.index(name)] if name in box.names else None


@lower_getattr_generic(BoxType)
def _field(context: Any, builder: Any, box: BoxType, address: Any, name: str) -> Any:
    i = box.names.index(name)
    where = builder.bitcast(address, context.get_value_type(box.payload).as_pointer())
    value = builder.extract_value(builder.load(where), i)
    return impl_ret_borrowed(context, builder, box.payload[i], value)


@intrinsic
def _store(_: Any, address: Any, fields: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], context.get_value_type(fields).as_pointer())
        builder.store(args[1], where)
        return context.get_dummy_value()

    return types.void(types.uintp, fields), lower


@intrinsic
def _size_of(_: Any, fields: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = context.get_abi_sizeof(context.get_value_type(fields))
        return context.get_constant(types.intp, size)

    return types.intp(fields), lower


@borrowing
def _fill(address: int, fields: Any) -> None:
    _store(address, fields)


@borrowing
def _size(fields: Any) -> int:
    return int(_size_of(fields))
