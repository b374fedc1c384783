"""Task outputs under a tokenizer that grows: which rows a new token changes, and to what.

Equal outputs are one row with a weight. It chooses no tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Int32, Tokens
from tasc_jobs.enrich.family import Growing
from tasc_jobs.enrich.ngrams import BREAK

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Change:
    """Rows before and after a new token, each ``weights`` times."""

    before: Tokens
    after: Tokens
    weights: Int64


class TokenisedOutputs:
    """A corpus of outputs, encoded by a tokenizer that is given tokens.

    Attributes:
        weights: ``int64[rows]``: how often each distinct output occurs.
        occurrences: ``int64[ids]``, of each token.
    """

    def __init__(self, texts: Sequence[str], growing: Growing, most_ids: int) -> None:
        counted = Counter(texts)
        self._growing = growing
        self._texts = list(counted)
        self._normalized = [growing.normalized(text) for text in self._texts]
        self.weights = np.fromiter(counted.values(), np.int64, len(counted))
        self._breaks = np.array(growing.cuts, np.int32)
        self.occurrences = np.zeros(most_ids, np.int64)
        self._rows = [np.array(ids, np.int32) for ids in growing.encode(self._texts)]
        self._count(self.tokens, self.weights)
        self._cut(self._rows)

    @property
    def tokens(self) -> Tokens:
        """All rows; `BREAK` stands for special tokens, and others that are a part of no n-gram."""
        return _flat(self._rows)

    @property
    def frequencies(self) -> list[int]:
        """Of the tokens that occur."""
        return [int(count) for count in self.occurrences[self.occurrences > 0]]

    @property
    def length(self) -> int:
        """Tokens of all outputs."""
        return int(self.occurrences.sum())

    def changed(self, content: str) -> Change:
        """Encode again the rows whose text has a new token's content."""
        written = self._growing.normalized(content)
        rows = [at for at, text in enumerate(self._normalized) if written in text]
        before, weights = _flat([self._rows[at] for at in rows]), self.weights[rows]
        for at, ids in zip(rows, self._encoded(rows), strict=True):
            self._rows[at] = ids
        after = _flat([self._rows[at] for at in rows])
        self._count(before, -weights)
        self._count(after, weights)
        return Change(before, after, weights)

    def _encoded(self, rows: Sequence[int]) -> list[Int32]:
        encoded = self._growing.encode([self._texts[at] for at in rows])
        return self._cut([np.array(ids, np.int32) for ids in encoded])

    def _cut(self, rows: list[Int32]) -> list[Int32]:
        if len(self._breaks):
            for ids in rows:
                ids[np.isin(ids, self._breaks)] = BREAK
        return rows

    def _count(self, tokens: Tokens, weights: Int64) -> None:
        """Those of `BREAK` are left out: they were counted once, and no new one stands for them."""
        each = np.repeat(weights, tokens.lengths)
        seen = tokens.ids != BREAK
        np.add.at(self.occurrences, tokens.ids[seen], each[seen])


def _flat(rows: Sequence[Int32]) -> Tokens:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Tokens(np.concatenate([np.zeros(0, np.int32), *rows]), lengths)
