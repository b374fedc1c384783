"""How CPU kernels are compiled: the compiler's options, tensors as flat arrays, and constant sizes.

A size that is known at compile time has its own type, so that loops over it are unrolled.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.extending import NativeValue, intrinsic, models, register_model, unbox
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft.compiled import Compiler

# numba has no 16-bit floats. Compiled code reads them as integers with the same bits; the integer
# type tells the float format. See `simd`.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def bits(tensor: Tensor) -> NDArray[Any]:
    """A contiguous CPU tensor as a flat array; `simd` names the element type of each dtype."""
    held = _BITS.get(tensor.dtype)
    flat = tensor.view(-1)
    found: NDArray[Any] = (flat if held is None else flat.view(held)).numpy()
    return found


def numbers(dtype: torch.dtype) -> Any:
    """The numpy type in which sums of a dtype are computed."""
    return np.float64 if dtype == torch.float64 else np.float32


class SizeType(types.Type):
    """The numba type of one size."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(name=f"Size({value})")


class Size:
    """A size as an argument of compiled code."""

    def __init__(self, value: int) -> None:
        self.value = value
        self._numba_type_ = SizeType(value)  # numba reads this


register_model(SizeType)(models.OpaqueModel)


@unbox(SizeType)
def _native(kind: SizeType, size: Any, c: Any) -> Any:
    return NativeValue(c.context.get_dummy_value())


@intrinsic
def value(_: Any, size: Any) -> Any:
    """The value of a `Size`, in compiled code."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, size.value)

    return types.intp(size), lower


def known(number: int) -> Any:
    """Returns a compiled function that returns the `Size` of ``number``."""
    kind = SizeType(number)

    def typed(_: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return context.get_dummy_value()

        return kind(), lower

    return intrinsic(typed)


ENGINE = Path(__file__).parents[2]
ROOMS = ("kernels/cpu", "kv", "sampling", "lora")  # folders of the compiled functions
_own = Compiler(*(ENGINE / room for room in ROOMS))
arithmetic, borrowing, ordered = _own.arithmetic, _own.borrowing, _own.ordered
