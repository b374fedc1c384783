"""What lies between the products of a Llama-like layer, on a CPU: compiled, over memory taken once.

It knows no weights but those it is given and no rows.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.kernels.cpu import layers
from tasc_engine.kernels.cpu.compiling import bits, numbers
from tasc_engine.kv.cache import RowCache
from tasc_engine.layout import Int64
from tasc_engine.model.operations import Norm


class CompiledOperations:
    """See `Operations`; the activation of gates is SiLU.

    Args:
        turns: See `TensorOperations`.
    """

    def __init__(self, turns: Tensor, heads: int, kv_heads: int) -> None:
        number = numbers(turns.dtype)
        self._number, self._none = number, np.zeros(0, number)
        wide = turns if number == np.float64 else turns.float()
        self._turns = wide.reshape(-1).numpy()
        self._heads, self._kv_heads, self._dim = heads, kv_heads, turns.shape[-1]
        self._hidden, self._stream = turns, self._none
        self._held: dict[str, tuple[Tensor, NDArray[Any]]] = {}

    def add_and_norm(self, hidden: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """See `Operations`."""
        if hidden is not self._hidden:
            self._hidden, self._stream = hidden, bits(hidden)
        stream = self._stream
        added = stream[:0] if delta is None else bits(delta)
        normed, flat = self._hold("normed", hidden.shape, hidden)
        layers.add_and_norm(stream, added, norm.flat, self._number(norm.eps), flat)
        return normed

    def turn_and_keep(
        self, layer: int, joined: Tensor, norm: Norm | None, cache: RowCache
    ) -> Tensor:
        """See `Operations`."""
        step, pool = cache.current, cache.bits(layer, self._kv_heads, self._dim, joined)
        query, flat = self._hold("query", (len(joined), self._heads, self._dim), joined)
        weights, eps = (self._none, 1.0) if norm is None else (norm.flat, norm.eps)
        layers.turn_and_keep(
            bits(joined), self._heads, self._kv_heads, self._dim, weights, self._number(eps),
            self._turns, step.positions, step.places, flat, pool,
        )  # fmt: skip
        return query

    def gate(self, joined: Tensor) -> Tensor:
        """See `Operations`."""
        width = joined.shape[1] // 2
        out, flat = self._hold("gated", (len(joined), width), joined)
        layers.gate(bits(joined), width, flat)
        return out

    def _hold(self, name: str, shape: Any, like: Tensor) -> tuple[Tensor, NDArray[Any]]:
        """Memory of a name, and its elements: taken anew only for another shape."""
        held = self._held.get(name)
        if held is None or held[0].shape != shape:
            made = torch.empty(shape, dtype=like.dtype)
            self._held[name] = held = made, bits(made)
        return held


def choose(logits: Tensor) -> Int64:
    """See `operations.greatest`; on a CPU."""
    out = np.empty(len(logits), np.int64)
    layers.choose(bits(logits.contiguous()), logits.shape[1], out)
    return out
