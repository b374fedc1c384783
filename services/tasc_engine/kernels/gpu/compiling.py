"""Declares Triton kernels, also where Triton is missing: modules with kernels can be imported."""

from typing import Any

try:
    import triton
except ImportError:
    triton = None

# The maximum of a thread. A launch that names it gets all registers that it needs. Otherwise ptxas
# may spill a few so that more programs run at once, but steps of decoding have few programs.
REGISTERS = 255


def jit(**settings: Any) -> Any:
    """Decorates a kernel with ``triton.jit``; leaves it unchanged without Triton."""
    return (lambda kernel: kernel) if triton is None else triton.jit(**settings)


def power(n: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``minimum``."""
    return max(minimum, 1 << (n - 1).bit_length())
