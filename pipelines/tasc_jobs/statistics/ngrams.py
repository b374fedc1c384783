"""Counts of n-grams and of row lengths; their sums do not depend on how rows were batched.

Figures need only a histogram: the number of n-grams by their count. A histogram grows with the
number of different counts, not with the number of different n-grams. An n-gram is written as its
symbols (words, token ids in digits, digests of whole texts) joined by blanks, which no symbol
contains. Arrow's kernels split and count; their white space is that of `str.split`.
"""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasc_jobs.words import BLANK, SIDES, TEXT, split_words, text_column, token_ids
from tasc_text.tokenizer import open_to_encode

WORDS, TEXTS, TOKENS = "words", "texts", "tokens"
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
MAX_BINS = 40
_DIGEST_BYTES = 16
_COUNTS = pa.schema([("ngram", TEXT), ("count", pa.int64())])
_UNSUMMED = 1 << 20  # counts that are kept before equal n-grams are summed


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

    def symbols(self, unit: str, texts: pa.LargeStringArray) -> pa.ListArray:
        """Splits each text into words, token ids in digits, or one digest of the whole text."""
        if unit == WORDS:
            return split_words(texts)
        if unit == TEXTS:
            different = texts.dictionary_encode()
            whole = different.dictionary.cast(pa.large_binary()).to_numpy(zero_copy_only=False)
            digests = [blake2b(t, digest_size=_DIGEST_BYTES).hexdigest() for t in whole]
            return split_words(pa.array(digests, TEXT).take(different.indices))
        assert self.tokenizer is not None
        return token_ids(_tokenizer(self.tokenizer).encode_outputs, texts).cast(pa.list_(TEXT))


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
    """A running sum of counts; the sum does not depend on their order.

    Memory grows with the number of different n-grams.
    """

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        """Number of rows by number of symbols."""
        self._counts = [_COUNTS.empty_table()]
        self._kept = self._different = 0

    def add_rows(self, running: pa.ListArray, n: int, lengths: pa.Array) -> None:
        """Counts rows, and all n-grams of the lists.

        Args:
            running: The symbols of each row, after up to ``n - 1`` symbols before the row if all
                rows are counted as one running text.
            lengths: The number of symbols of each row.
        """
        symbols, rows = running.flatten(), pc.list_parent_indices(running)
        if (firsts := len(symbols) - n + 1) > 0:
            shifted = (symbols[start : start + firsts] for start in range(n))
            within = pc.equal(rows[:firsts], rows[n - 1 :])
            found = pc.binary_join_element_wise(*shifted, BLANK).filter(within)
            self.add_ngrams(*found.value_counts().flatten())
        self.add_lengths(*lengths.value_counts().flatten())

    def add_ngrams(self, ngrams: pa.Array, counts: pa.Array) -> None:
        """Adds n-grams, which may be repeated, and the count of each."""
        self._counts.append(pa.Table.from_arrays([ngrams, counts], schema=_COUNTS))
        self._kept += len(counts)
        if self._kept > 2 * self._different + _UNSUMMED:
            self.ngrams()

    def add_lengths(self, lengths: pa.Array, rows: pa.Array) -> None:
        """Adds lengths, which may be repeated, and the number of rows of each."""
        for length, count in zip(lengths.to_pylist(), rows.to_pylist(), strict=True):
            self.lengths[length] += count

    def ngrams(self) -> pa.Table:
        """The different n-grams so far, with columns ngram and count."""
        kept = pa.concat_tables(self._counts)
        # Arrow's group_by takes several times as long for offsets of 64 bits.
        found = kept["ngram"].combine_chunks().dictionary_encode()
        sums = np.bincount(found.indices, kept["count"], len(found.dictionary))
        # Sums are exact below 2 ** 53.
        summed = pa.table([found.dictionary, sums.astype(np.int64)], schema=_COUNTS)
        self._counts = [summed]
        self._kept = self._different = summed.num_rows
        return summed

    def histogram(self) -> NgramHistogram:
        """The histogram of the sum so far; later additions do not change it."""
        frequencies = self.ngrams()["count"].value_counts().flatten()
        return NgramHistogram(_mapping(*frequencies), dict(self.lengths))


class CorpusTotal:
    """Running counts of both sides of a corpus."""

    def __init__(self, units: Units) -> None:
        self.totals = {(side, unit): NgramTotal() for side in SIDES for unit in units.orders}
        """By side and unit."""
        self._units = units

    @property
    def rows(self) -> int:
        """Number of rows whose lengths were added."""
        return self.totals[SIDES[0], WORDS].lengths.total()

    def add_rows(self, table: pa.Table) -> None:
        """Counts the rows of a table with a column of texts for each side.

        With `Units.across_rows`, the columns previous_input and previous_output have the words
        before each row, so the counts do not depend on how rows are batched.
        """
        for side in SIDES:
            texts = text_column(table, side)
            for unit, n in self._units.orders.items():
                running = symbols = self._units.symbols(unit, texts)
                if unit == WORDS and self._units.words_before:
                    before = text_column(table, f"previous_{side}")
                    running = split_words(pc.binary_join_element_wise(before, texts, BLANK))
                lengths = pc.list_value_length(symbols).fill_null(0)
                self.totals[side, unit].add_rows(running, n, lengths)

    def histograms(self) -> dict[tuple[str, str], NgramHistogram]:
        """Histograms by side and unit."""
        return {key: total.histogram() for key, total in self.totals.items()}


def _mapping(keys: pa.Array, values: pa.Array) -> dict[Any, int]:
    return dict(zip(keys.to_pylist(), values.to_pylist(), strict=True))


def joined(left: NgramHistogram, right: NgramHistogram) -> NgramHistogram:
    """Returns the sum of two histograms; no n-gram may be in both."""
    frequencies = Counter(left.frequencies) + Counter(right.frequencies)
    lengths = Counter(left.lengths) + Counter(right.lengths)
    return NgramHistogram(dict(frequencies), dict(lengths))
