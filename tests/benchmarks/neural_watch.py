"""A vocabulary that another one's drafts go through, to see how large it is and what it misses."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tasc_draft import Int32
from tasc_engine.neural.vocabulary import Vocabulary


class WatchedVocabulary:
    """See `Vocabulary`; it drafts what ``inner`` drafts.

    Attributes:
        sizes: Tokens that could be drafted, by draft and row.
        inside, tokens: Emitted tokens that were among them, and all, of rows that were drafted for.
    """

    def __init__(self, inner: Vocabulary) -> None:
        self._inner = inner
        self._active: dict[int, NDArray[np.int64]] = {}
        self.sizes: list[int] = []
        self.inside = self.tokens = 0

    @property
    def wants_top(self) -> int:
        return self._inner.wants_top

    def start(self, row: int, prompt: Int32) -> None:
        self._inner.start(row, prompt)

    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        if (active := self._active.pop(row, None)) is not None:
            self.inside += int(np.isin(tokens, active).sum())
            self.tokens += len(tokens)
        self._inner.observe(row, tokens, top)

    def drafted(self, rows: Tensor, ids: Tensor) -> None:
        self._inner.drafted(rows, ids)

    def prepare(self) -> None:
        self._inner.prepare()

    def finish(self, row: int) -> None:
        self._active.pop(row, None)
        self._inner.finish(row)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        found = self._inner.logits(hidden, rows)
        if hidden.shape[1] == 1:  # the first level
            columns = torch.arange(found.shape[-1])[None].expand(len(rows), -1)
            ids = self._inner.ids_of(columns, rows)
            for i, row in enumerate(rows.tolist()):
                self._active[row] = ids[i][torch.isfinite(found[i, 0])].numpy()
                self.sizes.append(len(self._active[row]))
        return found

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        return self._inner.ids_of(slots, rows)

    def sizes_of(self) -> float:
        return float(np.mean(self.sizes)) if self.sizes else 0.0
