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
from tasc_engine.layout import Int64, StepLayout
from tasc_engine.row_by_row import RowByRow

# Products of a row from which on torch is faster; measured with 32 and 64 places a head.
_MUCH = 400_000


class CompiledRows:
    """Attends for all rows of a step; see `RowByRow`."""

    def __init__(self, pool: Tensor) -> None:
        self._others = RowByRow(pool)
        self._layers = [bits(layer) for layer in pool]
        self._kv_heads = pool.shape[3]
        self._scratch: Scratch | None = None
        self._out = torch.empty(0)

    def bits(self, layer: int) -> NDArray[Any]:
        """One layer's keys and values as elements of `lanes`."""
        return self._layers[layer]

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Take in a step's layout."""
        self._others.begin(host, device)
        self._step = host
        self._work = (host.trunks + host.nodes) * np.diff(host.begins)
        self._split: tuple[Int64, list[int]] | None = None

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `RowCache.attend`; what is returned is overwritten by the next call."""
        query = query.contiguous()
        if self._out.shape != query.shape:
            self._out = torch.empty_like(query)
        out = self._out
        little, much = self._rows(query.shape[1] * query.shape[2])
        if len(little):
            scratch = self._scratch_of(query)
            attend(
                bits(query), self._layers[layer], self._step, little, scratch, scale, window,
                softcap, bits(out),
            )  # fmt: skip
        for row in much:
            self._others.attend_row(row, layer, query, scale, window, softcap, out)
        return out

    def _rows(self, width: int) -> tuple[Int64, list[int]]:
        """Rows for compiled code, and those for torch's."""
        if self._split is None:
            much = self._work * width >= _MUCH
            self._split = np.flatnonzero(~much), np.flatnonzero(much).tolist()
        return self._split

    def _scratch_of(self, query: Tensor) -> Scratch:
        if self._scratch is None:
            _, heads, dim = query.shape
            self._scratch = Scratch(heads, self._kv_heads, dim, numbers(query.dtype))
        return self._scratch
