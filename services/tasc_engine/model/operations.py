"""What lies between the products of a Llama-like layer, as tensor operations, on any device.

It knows no weights but those it is given and no rows.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import Int64

Activation = Callable[[Tensor], Tensor]


class Norm:
    """Weight of a root mean square norm (Zhang and Sennrich 2019) of the last dimension.

    Args:
        weight: ``[D]``, or ``[heads, D]`` for heads with weights of their own.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        weight = weight.detach()
        self.wide = weight if weight.dtype == torch.float64 else weight.float()
        self.eps = eps

    @cached_property
    def flat(self) -> NDArray[Any]:
        """The weight's numbers, for compiled code."""
        return self.wide.reshape(-1).numpy()

    def __call__(self, x: Tensor) -> Tensor:
        """``[N, D]`` or ``[N, heads, D]`` to a new tensor like it; float32 inside, or float64."""
        full = x.to(self.wide.dtype)
        factor = full.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return full.mul(factor).mul_(self.wide).to(x.dtype)


class Operations(Protocol):
    """Of packed tokens; what is returned is overwritten by the next call."""

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add ``delta`` to ``hidden``, both ``[N, D]``, in place; ``[N, D]`` its norm."""
        ...

    def turn_and_keep(
        self, layer: int, joined: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """``[N, heads, dim]`` queries; the cache gets keys and values.

        Args:
            joined: ``[N, (heads + 2 * kv_heads) * dim]`` queries, keys and values.
            norm: Of each head of queries and keys.
        """
        ...

    def gate(self, joined: Tensor) -> Tensor:
        """``[N, 2 * width]`` gates and values to ``[N, width]``: activated gates times values."""
        ...


class TensorOperations:
    """By torch.

    Args:
        turns: ``[positions, 2, dim]`` cosines, then sines, the first half's negative.
    """

    def __init__(self, turns: Tensor, heads: int, kv_heads: int, activation: Activation) -> None:
        self._turns, self._activation = turns.unsqueeze(2), activation
        self._heads, self._kv_heads, self._dim = heads, kv_heads, turns.shape[-1]

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Operations`."""
        if delta is not None:
            hidden.add_(delta)
        return norm(hidden)

    def turn_and_keep(
        self, layer: int, joined: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """See `Operations`."""
        assert cache.device is not None, "a forward begins with a layout"
        cos, sin = self._turns.index_select(0, cache.device.positions).unbind(1)
        joined = joined.view(len(joined), self._heads + 2 * self._kv_heads, self._dim)
        turned = joined[:, : self._heads + self._kv_heads]
        heads = turned if norm is None else norm(turned)
        # Su et al. 2021; with the sign of the first half in ``sin``, swapping halves is a roll.
        turned.copy_(heads * cos + heads.roll(self._dim // 2, -1) * sin)
        kv = joined[:, self._heads :].unflatten(1, (2, self._kv_heads))
        cache.keep(layer, kv)
        return joined[:, : self._heads]

    def gate(self, joined: Tensor) -> Tensor:
        """See `Operations`."""
        gate, value = joined.chunk(2, -1)
        return self._activation(gate).mul_(value)


def greatest(logits: Tensor) -> Int64:
    """``int64[M]`` the first of the greatest of each line; -1 where one is no number."""
    chosen: Int64 = first_greatest(logits).cpu().numpy()
    return chosen


def first_greatest(logits: Tensor) -> Tensor:
    """`greatest` on the device."""
    most, place = logits.max(-1)  # of equal ones the first
    return place.masked_fill_(most.isnan(), -1)
