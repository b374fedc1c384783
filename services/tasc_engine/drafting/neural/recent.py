"""A sliding window over each row's stream of candidate tokens, with a slot for each token in it.

MicroSpec, arXiv 2605.26444, section 3.2. All state is on the device and every shape depends on the
given shapes only, so nothing here waits for the device. What all rows drafted and observed since
the last update enters the window at once, in as many tensor operations as one row would take.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Entered:
    """What got a slot: flat places in ``[rows, capacity + 1]`` and ids, both ``int64[R, n]``.

    The place is in the last column, where nothing is read, and the id some token of the vocabulary
    wherever a candidate got none.
    """

    places: Tensor
    ids: Tensor


class RecentWindow:
    """The last ``window`` candidates of each row; doubles count, but share one slot.

    An id keeps its slot while it is in the window. Slots are given from 0 upwards and those let go
    are given again first, so a row never used one above the most it needed at once.

    Args:
        left_out: ``bool[V]``, ids that pass through the window without a slot.

    Attributes:
        capacity: Slots of a row.
        ids: ``int64[rows, capacity]``, the id in each slot, -1 in free ones.

    Raises:
        ValueError: ``rows`` or ``window`` is below 1.
    """

    def __init__(
        self,
        rows: int,
        window: int,
        vocab_size: int,
        device: torch.device,
        left_out: Tensor | None = None,
    ) -> None:
        if min(rows, window) < 1:
            raise ValueError(f"{rows} rows with a window of {window}; both must be at least 1")
        self.capacity = capacity = min(window, vocab_size)
        self._window, self._vocab_size = window, vocab_size
        # The last column of each table takes what must go nowhere.
        self._ring = torch.empty((rows, window + 1), dtype=torch.int64, device=device)
        self._head = torch.empty(rows, dtype=torch.int64, device=device)
        self._ids = torch.empty((rows, capacity + 1), dtype=torch.int64, device=device)
        self._free, self._free_count = torch.empty_like(self._ids), torch.empty_like(self._head)
        self._peaks = torch.empty_like(self._head)
        self._counts = torch.empty((rows, vocab_size + 1), dtype=torch.int32, device=device)
        self._slots, self._marks = torch.empty_like(self._counts), torch.empty_like(self._counts)
        self._empty = torch.full_like(self._slots[0], -1)
        if left_out is not None:
            self._empty[:-1].masked_fill_(left_out, capacity)  # of an id that never needs one
        self.ids = self._ids[:, :capacity]
        for row in range(rows):
            self.clear(row)

    def clear(self, row: int) -> None:
        """Forget a row's stream."""
        for table in (self._ring, self._ids):
            table[row].fill_(-1)
        for numbers in (self._head, self._peaks, self._counts):
            numbers[row].zero_()
        self._slots[row].copy_(self._empty)
        free = torch.arange(self.capacity, -1, -1, device=self._free.device) - 1
        self._free[row].copy_(free)
        self._free_count[row].fill_(self.capacity)

    @property
    def nbytes(self) -> int:
        tables = (self._ring, self._ids, self._free, self._counts, self._slots, self._marks)
        return sum(table.nbytes for table in tables)

    def sizes(self, rows: Tensor) -> Tensor:
        """``int64[R]``, slots in use."""
        return self.capacity - self._free_count[rows]

    def peaks(self, rows: Tensor) -> Tensor:
        """``int64[R]``, the most slots that were ever in use since the row was cleared."""
        return self._peaks[rows]

    def append(self, rows: Tensor, ids: Tensor) -> Entered:
        """Put candidates behind the streams of some rows, the first column first.

        Args:
            rows: ``int64[R]``, each once.
            ids: ``int64[R, n]``, n > 0; ids outside the vocabulary, -1 say, are passed over.
        """
        window = self._window
        valid = (ids >= 0) & (ids < self._vocab_size)
        order = valid.cumsum(1)
        total, head = order[:, -1:], self._head[rows, None]
        kept = valid & (order > total - window)  # what would be pushed out at once stays out
        places = torch.where(kept, (head + order - 1) % window, window) + self._row(rows, window)
        ids = torch.where(kept, ids, -1)
        leaving = torch.where(kept, self._ring.take(places), -1)
        self._ring.put_(places, ids)
        self._head[rows] = ((head + total) % window).squeeze(1)
        self._count(rows, leaving, -1)
        self._count(rows, ids, 1)
        self._let_go(rows, leaving)
        return self._take_in(rows, ids)

    def distinct(self, rows: Tensor, ids: Tensor) -> Tensor:
        """``ids int64[R, n]`` with -1 wherever the same id comes again later in its row."""
        return torch.where(self._last(rows, ids), ids, -1)

    def _count(self, rows: Tensor, ids: Tensor, by: int) -> None:
        added = torch.full_like(ids, by, dtype=torch.int32)
        self._counts.put_(self._at(rows, ids), added, accumulate=True)

    def _let_go(self, rows: Tensor, ids: Tensor) -> None:
        """Free the slots of those ids that are in the window no more."""
        at, capacity = self._at(rows, ids), self.capacity
        slots = self._slots.take(at).long()
        gone = self._last(rows, ids) & (self._counts.take(at) == 0)
        gone &= (slots >= 0) & (slots < capacity)
        number, first = gone.cumsum(1), self._row(rows, capacity)
        above = self._free_count[rows, None] + number - 1
        self._free.put_(torch.where(gone, above, capacity) + first, slots)
        self._ids.put_(torch.where(gone, slots, capacity) + first, torch.full_like(ids, -1))
        nowhere = self._at(rows, torch.full_like(ids, -1))
        self._slots.put_(torch.where(gone, at, nowhere), torch.full_like(at, -1, dtype=torch.int32))
        self._free_count.index_add_(0, rows, number[:, -1])

    def _take_in(self, rows: Tensor, ids: Tensor) -> Entered:
        """Give slots to those ids that have none yet."""
        at, capacity = self._at(rows, ids), self.capacity
        new = self._last(rows, ids) & (self._slots.take(at) < 0)
        number, first = new.cumsum(1), self._row(rows, capacity)
        top = torch.where(new, self._free_count[rows, None] - number, capacity)
        slots = torch.where(new, self._free.take(top + first), capacity)
        nowhere = self._at(rows, torch.full_like(ids, -1))
        self._slots.put_(torch.where(new, at, nowhere), slots.int())
        self._ids.put_(slots + first, ids)
        self._free_count.index_add_(0, rows, number[:, -1], alpha=-1)
        self._peaks[rows] = torch.maximum(self._peaks[rows], self.sizes(rows))
        return Entered(slots + first, torch.where(new, ids, 0))

    def _last(self, rows: Tensor, ids: Tensor) -> Tensor:
        """``bool[R, n]``: an id, and the last of its kind in its row."""
        at = self._at(rows, ids)
        order = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device).expand_as(ids)
        self._marks.put_(at, torch.full_like(order, -1))
        marks = self._marks.view(-1)
        marks.scatter_reduce_(0, at.flatten(), order.flatten(), "amax")
        return (self._marks.take(at) == order) & (ids >= 0)

    def _at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Flat places of ids in the tables of the whole vocabulary."""
        return torch.where(ids < 0, self._vocab_size, ids) + self._row(rows, self._vocab_size)

    @staticmethod
    def _row(rows: Tensor, columns: int) -> Tensor:
        return rows[:, None] * (columns + 1)
