"""What rows drafted and observed since the window was last brought up to date, as tables.

A step of all rows goes into the window at once; that takes as many tensor operations as one row.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft.tokens import Int32


class Steps:
    """Drafts, tokens and likeliest tokens that wait, by row; -1 stands where there is none.

    Args:
        most: Columns of drafts that may wait; of more the oldest levels are dropped.
    """

    def __init__(self, rows: int, most: int, device: torch.device) -> None:
        self._rows, self._most, self._device = rows, most, device
        self._levels: list[Tensor] = []
        self._seen: dict[int, list[tuple[Int32, Tensor | None]]] = {}

    @property
    def observed(self) -> bool:
        return bool(self._seen)

    def tensor(self, values: NDArray[np.int64]) -> Tensor:
        """On the device; a GPU fetches it when it comes to it."""
        found = torch.from_numpy(values)
        if self._device.type == "cuda":
            return found.pin_memory().to(self._device, non_blocking=True)
        return found.to(self._device)

    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        table = ids.new_full((self._rows, ids.shape[1]), -1)
        self._levels.append(table.index_copy_(0, rows, ids))
        while sum(level.shape[1] for level in self._levels[1:]) >= self._most:
            del self._levels[0]

    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        self._seen.setdefault(row, []).append((tokens, top))

    def forget(self, row: int) -> None:
        self._seen.pop(row, None)
        for level in self._levels:
            level[row].fill_(-1)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """What waited, ``int64[rows, n]`` each: drafts, tokens, the likeliest tokens."""
        nothing = torch.empty((self._rows, 0), dtype=torch.int64, device=self._device)
        found = torch.cat((nothing, *self._levels), 1), self._tokens(), self._top(nothing)
        self._levels, self._seen = [], {}
        return found

    def _tokens(self) -> Tensor:
        by_row = {r: np.concatenate([ids for ids, _ in seen]) for r, seen in self._seen.items()}
        table = np.full((self._rows, max(map(len, by_row.values()))), -1, np.int64)
        for row, ids in by_row.items():
            table[row, : len(ids)] = ids
        return self.tensor(table)

    def _top(self, nothing: Tensor) -> Tensor:
        tops = [(row, t) for row, seen in self._seen.items() for _, t in seen if t is not None]
        flat = [(row, top.flatten()) for row, top in tops if top.numel()]
        if not flat:
            return nothing
        filled = dict.fromkeys(self._seen, 0)
        places = []
        for row, ids in flat:
            places.append(np.stack((np.full(len(ids), row), np.arange(len(ids)) + filled[row])))
            filled[row] += len(ids)
        at = self.tensor(np.concatenate(places, 1))
        table = nothing.new_full((self._rows, max(filled.values())), -1)
        return table.index_put_((at[0], at[1]), torch.cat([ids for _, ids in flat]))
