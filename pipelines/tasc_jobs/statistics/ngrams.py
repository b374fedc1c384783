"""Counts of n-grams and of row lengths, and sums of them that do not depend on how rows were cut.

Figures need only how often n-grams occur: a histogram says that, and grows with the different
frequencies, not with the different n-grams. An n-gram is its symbols (words, or token ids in
digits), joined by blanks, which no symbol holds.
Pure functions; they know no tokenizer, no file, no Redis, no Ray.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NgramCounts:
    """How often each n-gram occurs, and how many rows have so many symbols each."""

    ngrams: Mapping[str, int]
    lengths: Mapping[int, int]


@dataclass(frozen=True)
class NgramHistogram:
    """How many n-grams occur so often each, and how many rows have so many symbols each."""

    frequencies: Mapping[int, int]
    lengths: Mapping[int, int]

    @property
    def rows(self) -> int:
        return sum(self.lengths.values())

    @property
    def symbols(self) -> int:
        return sum(length * rows for length, rows in self.lengths.items())


class NgramTotal:
    """A running sum of counts; the sum does not depend on their order."""

    def __init__(self) -> None:
        self._ngrams: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()

    def add_row(self, symbols: Sequence[str], n: int, before: str = "") -> None:
        """Count a row and the n-grams that end in it.

        Args:
            before: The ``n - 1`` words in front of the row, or all there are, joined by blanks.
                With them, the counts of rows add up to those of one running text.
        """
        running = [*before.split(), *symbols]
        shifted = (running[start:] for start in range(n))
        self._ngrams.update(map(" ".join, zip(*shifted, strict=False)))
        self._lengths[len(symbols)] += 1

    def add_ngram(self, ngram: str, count: int) -> None:
        self._ngrams[ngram] += count

    def add_length(self, length: int, rows: int) -> None:
        self._lengths[length] += rows

    def counts(self) -> NgramCounts:
        """The sum so far; later additions do not reach it."""
        return NgramCounts(dict(self._ngrams), dict(self._lengths))

    def histogram(self) -> NgramHistogram:
        """Of the sum so far; later additions do not reach it."""
        return NgramHistogram(dict(Counter(self._ngrams.values())), dict(self._lengths))


def joined(left: NgramHistogram, right: NgramHistogram) -> NgramHistogram:
    """The histogram of both together; no n-gram may be in both."""
    frequencies = Counter(left.frequencies) + Counter(right.frequencies)
    lengths = Counter(left.lengths) + Counter(right.lengths)
    return NgramHistogram(dict(frequencies), dict(lengths))


def last_words(text: str, most: int) -> str:
    """The last words, at most so many, joined by blanks; "" if there are none."""
    return " ".join(text.rsplit(maxsplit=most)[-most:]) if most else ""
