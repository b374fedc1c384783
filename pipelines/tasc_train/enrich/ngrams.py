"""Counts the n-grams of token ids in a task's outputs, and updates them after each new token.

The counting loop is compiled. Equal outputs are stored as one row with a weight.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tasc_draft import Int32, Tokens
from tasc_draft.compiled import Compiler
from tasc_train.enrich.growing_tokenizer import GrowingTokenizer

compiled = Compiler(Path(__file__).parent).compiled


Int64 = NDArray[np.int64]
BREAK = -1  # a placeholder id: no n-gram contains it
_ID_BITS = 32


class LiveNgramCounts:
    """Counts of all n-grams of 2 to ``n_max`` ids; each n-gram gets the next free slot.

    Args:
        ids: An upper bound: every token id is less than this.
    """

    def __init__(self, n_max: int, ids: int) -> None:
        self._n_max, self._ids = n_max, ids
        self._slots = numba.typed.Dict.empty(numba.int64, numba.int64)
        self._size = 0
        # By slot: count, prefix (see `_add`), last id, length, and whether it is excluded.
        self._counts = np.zeros(0, np.int64)
        self._before = np.zeros(0, np.int64)
        self._last = np.zeros(0, np.int32)
        self._n = np.zeros(0, np.int32)
        self._out = np.zeros(0, np.bool_)

    def add(self, ids: Int32, offsets: Int64, weights: Int64) -> None:
        """Add the n-grams of each row ``weights[row]`` times; a negative weight subtracts them.

        Args:
            ids: ``int32[tokens]``, the ids of all rows; no n-gram contains a `BREAK`.
            offsets: ``int64[rows + 1]``.
            weights: ``int64[rows]``.
        """
        self._reserve(self._size + len(ids) * (self._n_max - 1))
        self._size = _add(
            self._slots, self._counts, self._before, self._last, self._n, self._size,
            ids, offsets, weights, self._n_max, self._ids,
        )  # fmt: skip

    def best(self, min_count: int, discount: int = 0) -> tuple[int, int, int] | None:
        """Returns slot, count and reward of the n-gram with the greatest reward, if it is above 0.

        The reward is ``(count - discount) * (length - 1)``. Excluded n-grams, and those with
        a count below ``min_count``, are skipped. Ties go to the lexicographically smallest ids.
        """
        size = self._size
        taken = ~self._out[:size] & (self._counts[:size] >= min_count)
        rewards = (self._counts[:size] - discount) * (self._n[:size] - 1) * taken
        reward = int(rewards.max(initial=0))
        if reward == 0:
            return None
        equals = np.flatnonzero(rewards == reward)
        slot = min(map(int, equals), key=self.ngram)
        return slot, int(self._counts[slot]), reward

    def exclude(self, slot: int) -> None:
        """Makes `best` skip the n-gram from now on."""
        self._out[slot] = True

    def ngram(self, slot: int) -> tuple[int, ...]:
        """Returns the ids of the n-gram in a slot."""
        found = [int(self._last[slot])]
        before = int(self._before[slot])
        while before >= self._ids:
            slot = before - self._ids
            found.append(int(self._last[slot]))
            before = int(self._before[slot])
        return (before, *reversed(found))

    def _reserve(self, size: int) -> None:
        if size <= len(self._counts):
            return
        size = max(size, 2 * len(self._counts))
        for name in ("_counts", "_before", "_last", "_n", "_out"):
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)


@compiled
def _add(
    slots: Any,
    counts: Int64,
    before: Int64,
    last: Int32,
    n: Int32,
    size: int,
    ids: Int32,
    offsets: Int64,
    weights: Int64,
    n_max: int,
    above: int,
) -> int:
    """Counts n-grams by keys that join the prefix and the last id; returns the number of slots.

    The prefix of a bigram is its first id. The prefix of a longer n-gram is ``above`` plus the slot
    of the n-gram without its last id.
    """
    for row in range(len(weights)):
        for start in range(offsets[row], offsets[row + 1]):
            prefix = np.int64(ids[start])
            if prefix < 0:
                continue
            for stop in range(start + 1, min(start + n_max, offsets[row + 1])):
                id_ = ids[stop]
                if id_ < 0:
                    break
                key = (prefix << _ID_BITS) | id_
                if key in slots:
                    slot = slots[key]
                else:
                    slot = slots[key] = np.int64(size)
                    before[slot], last[slot], n[slot] = prefix, id_, stop - start + 1
                    size += 1
                counts[slot] += weights[row]
                prefix = slot + above
    return size


@dataclass(frozen=True)
class Change:
    """The rows that a new token changed, before and after; ``weights``: how often each occurs."""

    before: Tokens
    after: Tokens
    weights: Int64


class TokenisedOutputs:
    """A corpus of outputs, encoded by a tokenizer to which tokens are added one by one.

    Attributes:
        weights: ``int64[rows]``, how often each distinct output occurs.
        occurrences: ``int64[ids]``, how often each token occurs.
    """

    def __init__(self, texts: Sequence[str], growing: GrowingTokenizer, max_ids: int) -> None:
        counted = Counter(texts)
        self._growing = growing
        self._texts = list(counted)
        self._normalized = [growing.normalized(text) for text in self._texts]
        self.weights = np.fromiter(counted.values(), np.int64, len(counted))
        self._breaks = np.array(growing.cuts, np.int32)
        self.occurrences = np.zeros(max_ids, np.int64)
        self._rows = [np.array(ids, np.int32) for ids in growing.encode(self._texts)]
        self._count(self.tokens, self.weights)
        self._cut(self._rows)

    @property
    def tokens(self) -> Tokens:
        """All rows. Special tokens and other tokens that no n-gram may contain are `BREAK`."""
        return _flat(self._rows)

    @property
    def frequencies(self) -> list[int]:
        """The counts above 0 in `occurrences`."""
        return [int(count) for count in self.occurrences[self.occurrences > 0]]

    @property
    def length(self) -> int:
        """Number of tokens of all outputs."""
        return int(self.occurrences.sum())

    def changed(self, content: str) -> Change:
        """Encodes again the rows whose text contains the new token; returns the change."""
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
        """Skips `BREAK`: new tokens never change the counts of tokens that `BREAK` replaces."""
        each = np.repeat(weights, tokens.lengths)
        counted = tokens.ids != BREAK
        np.add.at(self.occurrences, tokens.ids[counted], each[counted])


def _flat(rows: Sequence[Int32]) -> Tokens:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return Tokens(np.concatenate([np.zeros(0, np.int32), *rows]), lengths)
