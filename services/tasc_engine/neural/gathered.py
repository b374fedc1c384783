"""The part of an LM head that each row needs, gathered into one contiguous buffer a row.

MicroSpec, arXiv 2605.26444, section 3.3. On CUDA the copies run on a stream of their own, behind
which only the next product waits. It does not know why a token is needed.
"""

import torch
from torch import Tensor

from tasc_engine.neural.recent import Entered, RecentWindow

# Columns are cut to a multiple of so many, and there are so many at least.
_COLUMNS = 64


class GatheredHead:
    """Logits of the ids in a window's slots.

    Args:
        head: Weight of the LM head, ``[V, H]``; not copied.
        bias: ``[V]``.
        gathered: Whether weights are copied as ids come; else each product looks them up.
    """

    def __init__(
        self, head: Tensor, bias: Tensor | None, rows: int, window: RecentWindow, gathered: bool
    ) -> None:
        self._head, self._window = head.detach(), window
        self._bias = head.new_zeros(head.shape[0]) if bias is None else bias.detach()
        size = head.shape[1]
        # The last slot takes the weights of what needs none.
        shape = (rows, window.capacity + 1, size)
        self._buffer = self._head.new_zeros(shape) if gathered else None
        self._offsets = self._head.new_empty((rows, window.capacity))
        cuda = gathered and head.is_cuda
        self._side = torch.cuda.Stream(head.device) if cuda else None
        self._copied = torch.cuda.Event() if cuda else None
        self.refresh()

    @property
    def row_bytes(self) -> int:
        """Of one token's weights."""
        return self._head.shape[1] * self._head.itemsize

    @property
    def nbytes(self) -> int:
        return self._offsets.nbytes + (0 if self._buffer is None else self._buffer.nbytes)

    def refresh(self) -> None:
        """Look again at which slots hold a token."""
        ids = self._window.ids
        bias = self._bias[ids.clamp(min=0)]
        self._offsets.copy_(torch.where(ids < 0, float("-inf"), bias))

    def gather(self, entered: Entered) -> None:
        """Copy the weights of what entered; on CUDA this only begins."""
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
        """``[R, w, H]`` to ``[R, w, A]``, A at most the window's capacity."""
        if self._copied is not None:
            torch.cuda.current_stream(self._head.device).wait_event(self._copied)
        return self._all_rows(hidden, rows) if hidden.is_cuda else self._row_by_row(hidden, rows)

    def _all_rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """One product of a shape that depends on no value."""
        if self._buffer is None:
            weights = self._head[self._window.ids[rows].clamp(min=0)]
            return torch.baddbmm(self._offsets[rows, None], hidden, weights.mT)
        # To pick some rows would copy their buffers.
        spread = hidden.new_zeros((len(self._buffer), *hidden.shape[1:]))
        spread.index_copy_(0, rows, hidden)
        weights = self._buffer[:, : self._window.capacity]
        return torch.baddbmm(self._offsets[:, None], spread, weights.mT)[rows]

    def _copy(self, buffer: Tensor, entered: Entered) -> None:
        weights = self._head.index_select(0, entered.ids.flatten())
        buffer.flatten(0, 1).index_copy_(0, entered.places.flatten(), weights)

    def _row_by_row(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """On a CPU nothing is waited for, so slots that no row ever used are left out."""
        most = int(self._window.peaks(rows).max()) if len(rows) else 0
        columns = min(self._window.capacity, -(-max(most, 1) // _COLUMNS) * _COLUMNS)
        out = hidden.new_empty((*hidden.shape[:2], columns))
        for place, row in enumerate(rows.tolist()):
            weights = self._weights(row, columns)
            torch.addmm(self._offsets[row, :columns], hidden[place], weights.T, out=out[place])
        return out

    def _weights(self, row: int, columns: int) -> Tensor:
        if self._buffer is None:
            return self._head[self._window.ids[row, :columns].clamp(min=0)]
        return self._buffer[row, :columns]
