"""Policy ``recent``: draft tokens lately in the row's context or likely there (MicroSpec).

arXiv 2605.26444; over ``ranked``, the union of both, which no paper tries. The candidates of the
window are the prompt and the target's likeliest tokens of the prefill, then of each step the
drafts, the emitted tokens, and the likeliest tokens of the verify.

The part of the LM head that each row needs is gathered into one contiguous buffer a row (section
3.3). On CUDA the copies run on a stream of their own; only the next product waits for it.
"""

import numpy as np
import torch
from torch import Tensor

from tasc_draft.tokens import Int32
from tasc_engine.drafting.neural.recent import Entered, RecentWindow, Steps
from tasc_engine.drafting.neural.vocabulary import checked_ids
from tasc_engine.model.linears import Linear

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


class RecentVocabulary:
    """The tokens in a window of each row's latest candidates, beside ``base`` where that is given.

    A step's drafts and tokens come into the window together, at the first `prepare` or `logits`
    behind `observe`; so no slot changes its token in the middle of a draft.

    Args:
        head: Weight of the LM head, ``[V, H]``.
        rows: Of the batch; a window and a buffer of gathered weights, ``[window + 1, H]``, each.
        window: Candidates in a window, doubles counted.
        pre: The target's likeliest tokens that are taken at each place of the prompt.
        ver: The same, at each place of an answer that was kept.
        base: Ids that may be drafted always, in every row.
        gathered: Keep a copy of the weights needed; else each product looks them up in the head.
        context: Take candidates from the prompt.
        extension: Take candidates from drafts and answers.
        bias: Of the head, ``[V]``.

    Raises:
        ValueError: ``pre`` or ``ver`` is below 0 or above the vocabulary, ``rows`` or ``window``
            is below 1, ``base`` does not fit the head, or there is nothing to take.
    """

    def __init__(
        self,
        head: Tensor,
        rows: int,
        window: int = 3072,
        pre: int = 3,
        ver: int = 3,
        base: Int32 | None = None,
        gathered: bool = True,
        context: bool = True,
        extension: bool = True,
        *,
        bias: Tensor | None = None,
    ) -> None:
        _check(head.shape[0], pre, ver)
        if not (context or extension):
            raise ValueError("neither context nor extension; leave at least one of them on")
        self._pre, self._ver = (pre if context else 0), (ver if extension else 0)
        self._context, self._extension = context, extension
        self.needs_top = max(self._pre, self._ver)
        self._base = None if base is None else checked_ids(base, head)
        self._base_head = _base_head(head, self._base, bias)
        left_out = None if self._base is None else _marked(self._base, head.shape[0])
        self._window = RecentWindow(rows, window, head.shape[0], head.device, left_out)
        self._head = GatheredHead(head, bias, rows, self._window, gathered)
        self._rows = torch.arange(rows, device=head.device)
        self._in_prompt: set[int] = set()
        self._most = window
        self._steps = Steps(rows, window, head.device)

    @property
    def nbytes(self) -> int:
        base = 0 if self._base is None else len(self._base) * self._head.row_bytes
        return base + self._window.nbytes + self._head.nbytes

    @torch.inference_mode()
    def start(self, row: int, prompt: Int32) -> None:
        self.finish(row)
        self._in_prompt.add(row)
        if self._context and len(prompt):
            ids = self._steps.tensor(prompt[None, -self._most :].astype(np.int64))
            self._append(self._rows[row : row + 1], ids)

    @torch.inference_mode()
    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        if row in self._in_prompt:
            if len(tokens):
                self._in_prompt.remove(row)
            if top is not None and len(top):
                self._observe_prompt(row, top)
            top = None
        if self._extension:
            self._steps.observe(row, tokens, None if top is None else top[:, : self._ver])

    @torch.inference_mode()
    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        if self._extension:
            self._steps.drafted(rows, ids)

    @torch.inference_mode()
    def prepare(self) -> None:
        if self._steps.observed:
            drafts, tokens, top = self._steps.take()
            unique = [self._window.distinct(self._rows, ids) for ids in (drafts, top)]
            self._append(self._rows, torch.cat((unique[0], tokens, unique[1]), 1))

    @torch.inference_mode()
    def finish(self, row: int) -> None:
        self._in_prompt.discard(row)
        self._steps.forget(row)
        self._window.clear(row)
        self._head.refresh()

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        self.prepare()
        recent = self._head.logits(hidden, rows)
        if self._base_head is None:
            return recent
        return torch.cat((self._base_head(hidden), recent), -1)

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        flat, ids = slots.flatten(1), self._window.ids
        if self._base is None:
            found = ids[rows[:, None], flat]
        else:
            ranked = len(self._base)
            found = ids[rows[:, None], (flat - ranked).clamp(min=0)]
            found = torch.where(flat < ranked, self._base[flat.clamp(max=ranked - 1)], found)
        return found.clamp(min=0).view_as(slots)

    def sizes(self, rows: Tensor) -> Tensor:
        return self._window.sizes(rows) + (0 if self._base is None else len(self._base))

    def _observe_prompt(self, row: int, top: Tensor) -> None:
        """The likeliest tokens of the prompt; without context, of its end alone."""
        ids = top[:, : self._pre] if self._context else top[-1:, : self._ver]
        if ids.numel():
            rows, flat = self._rows[row : row + 1], ids.reshape(1, -1)
            self._append(rows, self._window.distinct(rows, flat))

    def _append(self, rows: Tensor, ids: Tensor) -> None:
        if ids.shape[1]:
            self._head.gather(self._window.append(rows, ids))


def _check(vocab_size: int, pre: int, ver: int) -> None:
    for name, k in (("pre", pre), ("ver", ver)):
        if not 0 <= k <= vocab_size:
            raise ValueError(f"{name} is {k}; use 0 to {vocab_size}, the head's vocabulary")


def _base_head(head: Tensor, base: Tensor | None, bias: Tensor | None) -> Linear | None:
    if base is None:
        return None
    return Linear(head[base], None if bias is None else bias[base])


def _marked(ids: Tensor, size: int) -> Tensor:
    marked = torch.zeros(size, dtype=torch.bool, device=ids.device)
    marked[ids] = True
    return marked
