"""Rounds activations to int8 by row.

Arrays are flat; for their element types, see `simd`.
"""

from typing import Any

import numpy as np

from tasc_engine.kernels.cpu.compiling import ordered
from tasc_engine.kernels.cpu.simd import (
    WIDTH,
    absolute,
    broadcast,
    finite,
    greatest,
    load,
    maximum,
    mul,
    store_shifted,
    zeros,
)

_MOST = np.float32(127)  # -128 is not used, so that a number and its negative are equally exact
_NONE, _SHIFT = np.float32(0), np.float32(128)
_LEAST = np.float32(1e-36)  # 127 over a smaller number may be infinite


@ordered
def quantise(x: Any, out: Any, scales: Any) -> None:
    """Rounds each row to the integers from -127 to 127: ``x`` is about ``integer * scale``.

    The scale of a row with an infinity or a NaN is NaN, and so are its products. A row of numbers
    below 1e-36 counts as zeros.

    Args:
        x: ``float32[N * width]``.
        out: ``uint8[N * width]``, written: 128 more than the integers.
        scales: ``float32[N]``, written.
    """
    width = len(x) // max(len(scales), 1)
    whole = width // WIDTH * WIDTH
    for row in range(len(scales)):
        at, highest = row * width, zeros(x)
        for d in range(at, at + whole, WIDTH):
            highest = maximum(highest, absolute(load(x, d)))
        most = greatest(highest)
        for d in range(at + whole, at + width):
            if not abs(x[d]) <= most and most == most:
                most = abs(x[d])
        is_number = _LEAST <= most < np.float32(np.inf)
        factor = _MOST / most if is_number else _NONE
        scales[row] = most / _MOST if is_number else _NONE if most < _LEAST else np.float32(np.nan)
        for d in range(at, at + whole, WIDTH):
            store_shifted(out, d, finite(mul(load(x, d), broadcast(factor))))
        for d in range(at + whole, at + width):
            out[d] = np.uint8(np.rint(x[d] * factor) + _SHIFT) if is_number else np.uint8(_SHIFT)
