"""Tensors as the flat arrays that compiled code works on; no copies. It knows no layers."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# numba has no 16-bit floats: it is given their bits, of a type of integer for each; see `lanes`.
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def bits(tensor: Tensor) -> NDArray[Any]:
    """A contiguous tensor on the CPU as elements of `lanes`."""
    held = _BITS.get(tensor.dtype)
    flat = tensor.view(-1)
    found: NDArray[Any] = (flat if held is None else flat.view(held)).numpy()
    return found


def numbers(dtype: torch.dtype) -> Any:
    """The numpy type that sums of a dtype are taken in."""
    return np.float64 if dtype == torch.float64 else np.float32
