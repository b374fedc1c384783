"""Counts of n-grams and of row lengths; their sums do not depend on how rows were batched.

Figures need only a histogram: the number of n-grams by their count. A histogram grows with the
number of different counts, not with the number of different n-grams. An n-gram is written as its
symbols (words, token ids in digits, digests of whole texts) joined by blanks, which no symbol
contains. All functions are pure.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasc_text.tokenizer import open_to_encode

SIDES = ("input", "output")
WORDS, TEXTS, TOKENS = "words", "texts", "tokens"
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
MAX_BINS = 40
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Units:
    """N-grams of ``n`` words, whole texts and, if there is a tokenizer, single tokens.

    Words are separated by white space. Tokens are those of a row's bare text, without a template,
    special tokens around the text, or an end of sequence.

    Attributes:
        n: Number of words of an n-gram.
        tokenizer: A tokenizer.json; it must exist on every machine that counts.
        vocabulary: Number of tokens of the tokenizer.
        across_rows: Whether all rows of a side are one running text, so that n-grams of words may
            span rows, as in the paper's Table 1.
    """

    n: int = 2
    tokenizer: Path | None = None
    vocabulary: int = 0
    across_rows: bool = False

    @classmethod
    def of(cls, n: int, tokenizer: Path | None, *, across_rows: bool = False) -> "Units":
        """Reads the tokenizer, so that errors are raised before anything slow begins.

        Args:
            tokenizer: A tokenizer.json, or a folder with one.

        Raises:
            TokenizerError: The file does not exist or is damaged.
        """
        if tokenizer is None:
            return cls(n, across_rows=across_rows)
        found = open_to_encode(tokenizer)
        size = len(found.backend.get_vocab(with_added_tokens=True))
        return cls(n, found.path.absolute(), size, across_rows)

    @property
    def orders(self) -> dict[str, int]:
        """The number of symbols of an n-gram, by unit."""
        found = {WORDS: self.n, TEXTS: 1}
        return found if self.tokenizer is None else {**found, TOKENS: 1}

    @property
    def words_before(self) -> int:
        """Number of words before a row that an n-gram which ends in the row may contain."""
        return self.n - 1 if self.across_rows else 0

    def symbols(self, unit: str, texts: Sequence[str]) -> list[list[str]]:
        """Splits each text into words, token ids in digits, or one digest of the whole text."""
        if unit == WORDS:
            return [text.split() for text in texts]
        if unit == TEXTS:
            return [[_digest(text)] for text in texts]
        assert self.tokenizer is not None
        encoded = _tokenizer(self.tokenizer).encode_outputs(texts)
        return [[str(id_) for id_ in ids] for ids in encoded]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


_tokenizer = functools.cache(open_to_encode)  # once per process


@dataclass(frozen=True)
class Bin:
    """The number of rows with ``first`` to ``last`` symbols."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class Lengths:
    """The distribution of the number of symbols of a row.

    Attributes:
        mean: Mean over all rows.
        percentiles: By per cent p, the smallest length that p % of the rows do not exceed; "0" is
            the shortest row and "100" the longest.
        histogram: At most 40 bins of equal width; the last may be narrower.
    """

    mean: float
    percentiles: Mapping[str, int]
    histogram: tuple[Bin, ...]


def row_lengths(rows_by_length: Mapping[int, int]) -> Lengths:
    """Returns the figures of the number of rows by length; there must be at least one row."""
    rows = sum(rows_by_length.values())
    symbols = sum(length * count for length, count in rows_by_length.items())
    return Lengths(symbols / rows, _percentiles(rows_by_length, rows), _histogram(rows_by_length))


def _percentiles(rows_by_length: Mapping[int, int], rows: int) -> dict[str, int]:
    found: dict[str, int] = {}
    wanted, reached = list(PERCENTILES), 0
    for length in sorted(rows_by_length):
        reached += rows_by_length[length]
        while wanted and 100 * reached >= wanted[0] * rows:
            found[str(wanted.pop(0))] = length
    return found


def _histogram(rows_by_length: Mapping[int, int]) -> tuple[Bin, ...]:
    shortest, longest = min(rows_by_length), max(rows_by_length)
    width = -(-(longest - shortest + 1) // MAX_BINS)
    rows = [0] * -(-(longest - shortest + 1) // width)
    for length, count in rows_by_length.items():
        rows[(length - shortest) // width] += count
    firsts = range(shortest, longest + 1, width)
    return tuple(
        Bin(first, min(first + width - 1, longest), count)
        for first, count in zip(firsts, rows, strict=True)
    )


@dataclass(frozen=True)
class NgramCounts:
    """The count of each n-gram, and the number of rows by number of symbols."""

    ngrams: Mapping[str, int]
    lengths: Mapping[int, int]


@dataclass(frozen=True)
class NgramHistogram:
    """The number of n-grams by count, and the number of rows by number of symbols."""

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
        """Counts a row and the n-grams that end in it.

        Args:
            before: The last ``n - 1`` words before the row, or as many as exist, joined by blanks,
                if all rows are counted as one running text.
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
        """The sum so far; later additions do not change it."""
        return NgramCounts(dict(self._ngrams), dict(self._lengths))

    def histogram(self) -> NgramHistogram:
        """The histogram of the sum so far; later additions do not change it."""
        return NgramHistogram(dict(Counter(self._ngrams.values())), dict(self._lengths))


def joined(left: NgramHistogram, right: NgramHistogram) -> NgramHistogram:
    """Returns the sum of two histograms; no n-gram may be in both."""
    frequencies = Counter(left.frequencies) + Counter(right.frequencies)
    lengths = Counter(left.lengths) + Counter(right.lengths)
    return NgramHistogram(dict(frequencies), dict(lengths))
