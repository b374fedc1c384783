"""A vocabulary that is watched: how many tokens it lets draft, and how many of those to come.

It costs time, so no run with it is timed.
"""

import torch
from torch import Tensor

from tasc_draft.tokens import Int32
from tasc_engine.neural.vocabulary import Vocabulary


class WatchedVocabulary:
    """Another vocabulary, and what it would have let draft of the tokens that were emitted."""

    def __init__(self, inner: Vocabulary, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self._active: dict[int, Tensor] = {}
        self._sizes: list[int] = []
        self._tokens = self._covered = 0

    @property
    def wants_top(self) -> int:
        return self._inner.wants_top

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    @property
    def size(self) -> float:
        """Mean of all rows of all drafts."""
        return sum(self._sizes) / max(1, len(self._sizes))

    @property
    def coverage(self) -> float:
        """The share of the tokens emitted behind drafts."""
        return self._covered / max(1, self._tokens)

    def forget(self) -> None:
        """What was watched so far: a proposer drafts once before its first request comes."""
        self._sizes.clear()
        self._tokens = self._covered = 0

    def start(self, row: int, prompt: Int32) -> None:
        self._inner.start(row, prompt)

    def observe(self, row: int, tokens: Int32, top: Tensor | None) -> None:
        if (active := self._active.pop(row, None)) is not None:
            self._tokens += len(tokens)
            self._covered += int(active[torch.from_numpy(tokens.astype("int64"))].sum())
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
        for at, row in enumerate(rows.tolist()):
            if row not in self._active:  # the draft's first level
                self._active[row] = self._allowed(found[at, 0], rows[at : at + 1])
                self._sizes.append(int(self._inner.sizes(rows[at : at + 1])))
        return found

    def ids_of(self, slots: Tensor, rows: Tensor) -> Tensor:
        return self._inner.ids_of(slots, rows)

    def sizes(self, rows: Tensor) -> Tensor:
        return self._inner.sizes(rows)

    def _allowed(self, logits: Tensor, row: Tensor) -> Tensor:
        slots = (~torch.isneginf(logits)).nonzero()[:, 0]
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[self._inner.ids_of(slots[None], row)[0]] = True
        return allowed
