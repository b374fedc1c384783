"""Attention on a CPU: compiled code for rows that bring little, torch's for those that bring much.

Torch's starts slower and multiplies faster. It knows rows and places, no tokens.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_engine.cpu.attention import Scratch, attend
from tasc_engine.cpu.bits import bits, numbers
from tasc_engine.errors import UnsupportedModel
from tasc_engine.layout import Int64, StepLayout
from tasc_engine.row_by_row import RowByRow

# Torch is faster from so many queries of a head of keys on, if there is enough to do; measured
# with 32 to 128 places a head and contexts up to 900.
_MANY, _MUCH = 24, 400_000


class CompiledRows:
    """Attends for all rows of a step; see `RowByRow`."""

    def __init__(self, pool: Tensor) -> None:
        self._others = RowByRow(pool)
        self._layers = [bits(layer) for layer in pool]
        self._kv_heads = pool.shape[3]
        self._scratch: Scratch | None = None
        self._query = self._out = torch.empty(0)
        self._asked = self._found = bits(self._out)

    def bits(self, layer: int) -> NDArray[Any]:
        """One layer's keys and values as elements of `lanes`."""
        return self._layers[layer]

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Take in a step's layout."""
        self._others.begin(host, device)
        self._step = host
        self._lengths = host.trunks + host.nodes
        self._tokens = np.diff(host.begins)
        self._little: Int64 | None = None
        self._much: list[int] = []

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `RowCache.attend`; what is returned is overwritten by the next call."""
        query = query.contiguous()
        self._take(query)
        scratch, little = self._prepared(query)
        if len(little):
            attend(
                self._asked, self._layers[layer], self._step, little, scratch, scale, window,
                softcap, self._found,
            )  # fmt: skip
        for row in self._much:
            self._others.attend_row(row, layer, query, scale, window, softcap, self._out)
        return self._out

    def _take(self, query: Tensor) -> None:
        """Queries and memory for what they find, as arrays; mostly those of the layer before."""
        if query is not self._query:
            if self._out.shape != query.shape:
                self._out = torch.empty_like(query)
                self._found = bits(self._out)
            self._query, self._asked = query, bits(query)

    def _prepared(self, query: Tensor) -> tuple[Scratch, Int64]:
        """Memory to work in, and the rows for compiled code; once a step."""
        _, heads, dim = query.shape
        if self._scratch is None:
            self._scratch = Scratch(heads, self._kv_heads, dim, numbers(query.dtype))
        if self._scratch.heads != heads:
            raise UnsupportedModel(f"layers have {self._scratch.heads} and {heads} query heads")
        if self._little is None:
            work = self._tokens * self._lengths * (heads * dim)
            much = (self._tokens * (heads // self._kv_heads) >= _MANY) & (work >= _MUCH)
            self._little, self._much = np.flatnonzero(~much), np.flatnonzero(much).tolist()
            self._scratch.hold(int(self._lengths[self._little].max(initial=0)))
        return self._scratch, self._little
