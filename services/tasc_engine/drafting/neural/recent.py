"""Vocabulary ``recent``: drafts tokens that recently occurred, or were likely, in a row's context.

See MicroSpec, arXiv 2605.26444. With ``ranked`` as base, tokens are drafted from the union of both,
which no paper describes. Candidates are the prompt and the target's likeliest tokens of the
prefill, then for each step the drafts, the emitted tokens, and the likeliest tokens of the
verification. Each row has a sliding window over its stream of candidates, and each token in the
window has a slot (section 3.2). All tokens that rows drafted and observed since the last update
enter the window together. Shapes depend only on the shapes of inputs, so the host never waits for
the device. The part of the LM head that each row needs is gathered into one contiguous buffer per
row (section 3.3). On CUDA, a separate stream gathers these weights, and only the next product waits
for this stream.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft.drafts import Int32
from tasc_engine.drafting.neural.vocabulary import checked_ids
from tasc_engine.model.linears import Linear


class Steps:
    """Pending drafts, tokens and likeliest tokens by row; -1 marks empty places.

    Args:
        max_columns: Maximum number of pending columns of drafts; if exceeded, the oldest levels are
            dropped.
    """

    def __init__(self, rows: int, max_columns: int, device: torch.device) -> None:
        self._rows, self._max_columns, self._device = rows, max_columns, device
        self._levels: list[Tensor] = []
        self._observed: dict[int, list[tuple[Int32, Tensor | None]]] = {}

    @property
    def observed(self) -> bool:
        return bool(self._observed)

    def tensor(self, values: NDArray[np.int64]) -> Tensor:
        """Copies values to the device; on a GPU the copy is asynchronous."""
        found = torch.from_numpy(values)
        if self._device.type == "cuda":
            return found.pin_memory().to(self._device, non_blocking=True)
        return found.to(self._device)

    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        table = ids.new_full((self._rows, ids.shape[1]), -1)
        self._levels.append(table.index_copy_(0, rows, ids))
        while sum(level.shape[1] for level in self._levels[1:]) >= self._max_columns:
            del self._levels[0]

    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        self._observed.setdefault(row, []).append((tokens, top))

    def forget(self, row: int) -> None:
        self._observed.pop(row, None)
        for level in self._levels:
            level[row].fill_(-1)

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Removes and returns drafts, tokens and likeliest tokens, each ``int64[rows, n]``."""
        nothing = torch.empty((self._rows, 0), dtype=torch.int64, device=self._device)
        found = torch.cat((nothing, *self._levels), 1), self._tokens(), self._top(nothing)
        self._levels, self._observed = [], {}
        return found

    def _tokens(self) -> Tensor:
        by_row = {r: np.concatenate([ids for ids, _ in own]) for r, own in self._observed.items()}
        table = np.full((self._rows, max(map(len, by_row.values()))), -1, np.int64)
        for row, ids in by_row.items():
            table[row, : len(ids)] = ids
        return self.tensor(table)

    def _top(self, nothing: Tensor) -> Tensor:
        tops = [(r, t) for r, own in self._observed.items() for _, t in own if t is not None]
        flat = [(row, top.flatten()) for row, top in tops if top.numel()]
        if not flat:
            return nothing
        filled = dict.fromkeys(self._observed, 0)
        places = []
        for row, ids in flat:
            places.append(np.stack((np.full(len(ids), row), np.arange(len(ids)) + filled[row])))
            filled[row] += len(ids)
        at = self.tensor(np.concatenate(places, 1))
        table = nothing.new_full((self._rows, max(filled.values())), -1)
        return table.index_put_((at[0], at[1]), torch.cat([ids for _, ids in flat]))


@dataclass(frozen=True)
class Entered:
    """Ids that got a slot, and the slots' flat places in ``[rows, capacity + 1]``.

    Both are ``int64[R, n]``. A candidate that got no slot has a place in the last column, which is
    not read, and an arbitrary id.
    """

    places: Tensor
    ids: Tensor


class RecentWindow:
    """The last ``window`` candidates of each row, with duplicates; duplicates share one slot.

    An id keeps its slot while it is in the window. Slots are assigned from 0 upwards, and freed
    slots are reused first, so slot numbers stay below the most slots in use at one time.

    Args:
        left_out: ``bool[V]``, ids that never get a slot.

    Attributes:
        capacity: Number of slots of a row.
        ids: ``int64[rows, capacity]``, the id in each slot; -1 in free slots.
    """

    def __init__(
        self,
        rows: int,
        window: int,
        vocab_size: int,
        device: torch.device,
        left_out: Tensor | None = None,
    ) -> None:
        self.capacity = capacity = min(window, vocab_size)
        self._window, self._vocab_size = window, vocab_size
        # The last column of each table receives the writes that must have no effect.
        self._ring = torch.empty((rows, window + 1), dtype=torch.int64, device=device)
        self._head = torch.empty(rows, dtype=torch.int64, device=device)
        self._ids = torch.empty((rows, capacity + 1), dtype=torch.int64, device=device)
        self._free, self._free_count = torch.empty_like(self._ids), torch.empty_like(self._head)
        self._peaks = torch.empty_like(self._head)
        self._counts = torch.empty((rows, vocab_size + 1), dtype=torch.int32, device=device)
        self._slots, self._marks = torch.empty_like(self._counts), torch.empty_like(self._counts)
        self._empty = torch.full_like(self._slots[0], -1)
        if left_out is not None:
            self._empty[:-1].masked_fill_(left_out, capacity)  # for ids that never need a slot
        self.ids = self._ids[:, :capacity]
        for row in range(rows):
            self.clear(row)

    def clear(self, row: int) -> None:
        """Clears a row's stream."""
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
        """``int64[R]``, the number of slots in use."""
        return self.capacity - self._free_count[rows]

    def peaks(self, rows: Tensor) -> Tensor:
        """``int64[R]``, the maximum number of slots in use since the row was cleared."""
        return self._peaks[rows]

    def append(self, rows: Tensor, ids: Tensor) -> Entered:
        """Appends candidates to the streams of some rows, the first column first.

        Args:
            rows: ``int64[R]``, each once.
            ids: ``int64[R, n]`` with n > 0; ids outside the vocabulary, such as -1, are skipped.
        """
        window = self._window
        valid = (ids >= 0) & (ids < self._vocab_size)
        order = valid.cumsum(1)
        total, head = order[:, -1:], self._head[rows, None]
        kept = valid & (order > total - window)  # without ids that later ids push out
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
        """Returns ``ids int64[R, n]``, with -1 for an id that occurs again later in its row.

        Ids outside the vocabulary also become -1.
        """
        ids = torch.where((ids >= 0) & (ids < self._vocab_size), ids, -1)
        return torch.where(self._last(rows, ids), ids, -1)

    def _count(self, rows: Tensor, ids: Tensor, by: int) -> None:
        added = torch.full_like(ids, by, dtype=torch.int32)
        self._counts.put_(self._at(rows, ids), added, accumulate=True)

    def _let_go(self, rows: Tensor, ids: Tensor) -> None:
        """Frees the slots of ids that are no longer in the window."""
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
        """Assigns slots to ids that have no slot yet."""
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
        """``bool[R, n]``: whether a place has a valid id that does not occur later in the row."""
        at = self._at(rows, ids)
        order = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device).expand_as(ids)
        self._marks.put_(at, torch.full_like(order, -1))
        marks = self._marks.view(-1)
        marks.scatter_reduce_(0, at.flatten(), order.flatten(), "amax")
        return (self._marks.take(at) == order) & (ids >= 0)

    def _at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Flat places of ids in tables with a column for each id of the vocabulary."""
        return torch.where(ids < 0, self._vocab_size, ids) + self._row(rows, self._vocab_size)

    @staticmethod
    def _row(rows: Tensor, columns: int) -> Tensor:
        return rows[:, None] * (columns + 1)


# The number of columns of logits is rounded up to a multiple of this number.
_COLUMNS = 64


class GatheredHead:
    """Computes logits of the ids in a window's slots.

    Args:
        head: Weight of the LM head, ``[V, H]``; not copied.
        gathered: Whether weights are copied when ids enter; if not, each product looks them up.
    """

    def __init__(self, head: Tensor, rows: int, window: RecentWindow, gathered: bool) -> None:
        self._head, self._window = head.detach(), window
        # The last slot receives the weights of ids that need no slot.
        shape = (rows, window.capacity + 1, head.shape[1])
        self._buffer = self._head.new_zeros(shape) if gathered else None
        self._offsets = self._head.new_empty((rows, window.capacity))
        cuda = gathered and head.is_cuda
        self._side = torch.cuda.Stream(head.device) if cuda else None
        self._copied = torch.cuda.Event() if cuda else None
        self.refresh()

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's weights."""
        return self._head.shape[1] * self._head.itemsize

    @property
    def nbytes(self) -> int:
        return self._offsets.nbytes + (0 if self._buffer is None else self._buffer.nbytes)

    def refresh(self) -> None:
        """Updates which slots hold a token."""
        self._offsets.copy_(torch.where(self._window.ids < 0, float("-inf"), 0.0))

    def gather(self, entered: Entered) -> None:
        """Copies the weights of ids that entered the window; asynchronous on CUDA."""
        self.refresh()
        if self._buffer is None:
            return
        if self._side is None or self._copied is None:
            self._copy(self._buffer, entered)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._head.device))
        with torch.cuda.stream(self._side):
            self._copy(self._buffer, entered)
            self._copied.record(self._side)
        for tensor in (entered.places, entered.ids):
            tensor.record_stream(self._side)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Maps ``[R, w, H]`` to logits ``[R, w, A]``; A is at most the window's capacity."""
        if self._copied is not None:
            torch.cuda.current_stream(self._head.device).wait_event(self._copied)
        return self.all_rows(hidden, rows) if hidden.is_cuda else self.row_by_row(hidden, rows)

    def all_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """One product for all rows, with a shape that does not depend on values."""
        if self._buffer is None:
            weights = self._head[self._window.ids[rows].clamp(min=0)]
            return torch.baddbmm(self._offsets[rows, None], hidden, weights.mT)
        # All rows are used, since a selection of rows would copy their buffers.
        spread = hidden.new_zeros((len(self._buffer), *hidden.shape[1:]))
        spread.index_copy_(0, rows, hidden)
        weights = self._buffer[:, : self._window.capacity]
        return torch.baddbmm(self._offsets[:, None], spread, weights.mT)[rows]

    def _copy(self, buffer: Tensor, entered: Entered) -> None:
        weights = self._head.index_select(0, entered.ids.flatten())
        buffer.flatten(0, 1).index_copy_(0, entered.places.flatten(), weights)

    def row_by_row(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """One product per row, without unused slots; for CPUs, where reading a size is fast."""
        max_columns = int(self._window.peaks(rows).max()) if len(rows) else 0
        columns = min(self._window.capacity, -(-max(max_columns, 1) // _COLUMNS) * _COLUMNS)
        out = hidden.new_empty((*hidden.shape[:2], columns))
        for place, row in enumerate(rows.tolist()):
            weights = self._weights(row, columns)
            torch.addmm(self._offsets[row, :columns], hidden[place], weights.T, out=out[place])
        return out

    def _weights(self, row: int, columns: int) -> Tensor:
        if self._buffer is None:
            return self._head[self._window.ids[row, :columns].clamp(min=0)]
        return self._buffer[row, :columns]


class RecentVocabulary:
    """The tokens in a window of each row's latest candidates, and the tokens of ``base`` if given.

    A step's drafts and tokens enter the window together, at the first `prepare` or `logits` after
    `observe`, so no slot changes its token during a draft.

    Args:
        head: Weight of the LM head, ``[V, H]``.
        rows: Number of rows of the batch; each has a window and a buffer of gathered weights,
            ``[window + 1, H]``.
        window: Number of candidates in a window, including duplicates.
        base: Ids that may always be drafted in every row.
        gathered: Whether the needed weights are copied; if not, each product looks them up in the
            head.
        context: Whether the prompt gives candidates.
        extension: Whether drafts and answers give candidates.

    Raises:
        ValueError: ``base`` does not fit the head.
    """

    needs_top = 3  # as in MicroSpec, at each place of prompt and answer

    def __init__(
        self,
        head: Tensor,
        rows: int,
        window: int = 3072,
        base: Int32 | None = None,
        gathered: bool = True,
        context: bool = True,
        extension: bool = True,
    ) -> None:
        self._context, self._extension = context, extension
        self._base = None if base is None else checked_ids(base, head)
        self._base_head = None if self._base is None else Linear(head[self._base])
        left_out = None
        if self._base is not None:
            none = torch.zeros(head.shape[0], dtype=torch.bool, device=head.device)
            left_out = none.index_fill_(0, self._base, True)
        self.window = RecentWindow(rows, window, head.shape[0], head.device, left_out)
        self.head = GatheredHead(head, rows, self.window, gathered)
        self._rows = torch.arange(rows, device=head.device)
        self._in_prompt: set[int] = set()
        self._max_columns = window
        self._steps = Steps(rows, window, head.device)

    @property
    def nbytes(self) -> int:
        base = 0 if self._base is None else len(self._base) * self.head.row_bytes
        return base + self.window.nbytes + self.head.nbytes

    @torch.inference_mode()
    def start(self, row: int, prompt: Int32) -> None:
        self.finish(row)
        self._in_prompt.add(row)
        if self._context and len(prompt):
            ids = self._steps.tensor(prompt[None, -self._max_columns :].astype(np.int64))
            self._append(self._rows[row : row + 1], ids)

    @torch.inference_mode()
    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        if row in self._in_prompt:
            if len(tokens):
                self._in_prompt.remove(row)
            if top is not None and len(top):
                rows = self._rows[row : row + 1]
                ids = top if self._context else top[-1:]  # else the last ones
                self._append(rows, self.window.distinct(rows, ids.reshape(1, -1)))
            top = None
        if self._extension:
            self._steps.observe(row, tokens, top)

    @torch.inference_mode()
    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        if self._extension:
            self._steps.drafted(rows, ids)

    @torch.inference_mode()
    def prepare(self) -> None:
        if self._steps.observed:
            drafts, tokens, top = self._steps.take()
            unique = [self.window.distinct(self._rows, ids) for ids in (drafts, top)]
            self._append(self._rows, torch.cat((unique[0], tokens, unique[1]), 1))

    @torch.inference_mode()
    def finish(self, row: int) -> None:
        self._in_prompt.discard(row)
        self._steps.forget(row)
        self.window.clear(row)
        self.head.refresh()

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        self.prepare()
        recent = self.head.logits(hidden, rows)
        if self._base_head is None:
            return recent
        return torch.cat((self._base_head(hidden), recent), -1)

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        flat, ids = slots.flatten(1), self.window.ids
        if self._base is None:
            found = ids[rows[:, None], flat]
        else:
            ranked = len(self._base)
            found = ids[rows[:, None], (flat - ranked).clamp(min=0)]
            found = torch.where(flat < ranked, self._base[flat.clamp(max=ranked - 1)], found)
        return found.clamp(min=0).view_as(slots)

    def sizes(self, rows: Tensor) -> Tensor:
        return self.window.sizes(rows) + (0 if self._base is None else len(self._base))

    def _append(self, rows: Tensor, ids: Tensor) -> None:
        if ids.shape[1]:
            self.head.gather(self.window.append(rows, ids))
