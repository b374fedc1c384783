"""Counts of n-grams as tables, each n-gram with its partition, and sums of such tables.

A partition holds all counts of its n-grams, whichever rows they came from, so that partitions can
be summed one by one. It knows no Redis, no Ray and no figures.
"""

import zlib
from collections.abc import Mapping
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tasc_jobs.statistics.ngrams import NgramCounts, NgramHistogram, NgramTotal
from tasc_jobs.statistics.units import SIDES, WORDS, Units

_COUNTS = pa.schema(
    [
        ("side", pa.string()),
        ("unit", pa.string()),
        ("ngram", pa.string()),  # either these two
        ("partition", pa.int32()),
        ("length", pa.int64()),  # or this is not null
        ("count", pa.int64()),
    ]
)
Histograms: TypeAlias = Mapping[tuple[str, str], NgramHistogram]
"""By side and unit."""


def count_rows(units: Units, partitions: int, table: pa.Table) -> pa.Table:
    """Rows of a `RedisCorpusSource` -> a table of their counts, for so many partitions.

    Every row brings the words in front of it, so however they are cut will do.
    """
    return pa.concat_tables(
        _encoded(side, unit, _counts_of(table, side, unit, units), partitions)
        for side in SIDES
        for unit in units.orders
    )


def partition_of(ngram: str, partitions: int) -> int:
    """0 to ``partitions - 1``, the same in every process (`hash` of a string is not)."""
    return zlib.crc32(ngram.encode()) % partitions


def ngrams_in(table: pa.Table, partition: int) -> pa.Table:
    """The rows of a table of counts that are n-grams of this partition."""
    return table.filter(pc.equal(table["partition"], partition))


def lengths_in(table: pa.Table) -> pa.Table:
    """The rows of a table of counts that are lengths."""
    return table.filter(pc.is_valid(table["length"]))


class TableSum:
    """A running sum of tables of counts; memory grows with the different n-grams in them."""

    def __init__(self, units: Units) -> None:
        self.rows = 0
        """Rows of the corpus whose lengths were in a table so far."""
        self._totals = {(side, unit): NgramTotal() for side in SIDES for unit in units.orders}

    def add(self, table: pa.Table) -> None:
        for side, unit, ngram, _, length, count in zip(
            *(column.to_pylist() for column in table.columns), strict=True
        ):
            if ngram is not None:
                self._totals[side, unit].add_ngram(ngram, count)
                continue
            self._totals[side, unit].add_length(length, count)
            if (side, unit) == (SIDES[0], WORDS):
                self.rows += count

    def histograms(self) -> Histograms:
        return {key: total.histogram() for key, total in self._totals.items()}


def _counts_of(table: pa.Table, side: str, unit: str, units: Units) -> NgramCounts:
    total, n = NgramTotal(), units.orders[unit]
    befores = table[f"previous_{side}"].to_pylist() if n > 1 else [""] * table.num_rows
    symbols = units.symbols(unit, table[side].to_pylist())
    for row, before in zip(symbols, befores, strict=True):
        total.add_row(row, n, before)
    return total.counts()


def _encoded(side: str, unit: str, counts: NgramCounts, partitions: int) -> pa.Table:
    """One row for each n-gram, and one for each length."""
    ngrams, lengths = counts.ngrams, counts.lengths
    rows = len(ngrams) + len(lengths)
    no_ngram = [None] * len(lengths)
    columns = [
        [side] * rows,
        [unit] * rows,
        [*ngrams, *no_ngram],
        [*(partition_of(ngram, partitions) for ngram in ngrams), *no_ngram],
        [*[None] * len(ngrams), *lengths],
        [*ngrams.values(), *lengths.values()],
    ]
    return pa.table(columns, schema=_COUNTS)
