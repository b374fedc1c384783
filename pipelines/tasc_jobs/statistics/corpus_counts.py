"""The n-grams of a corpus in Redis, counted by Ray Data: each block where it is read, the sum here.

Between the two travel tables of counts, so memory grows with the *unique* n-grams only: with those
of a batch there, with those of the corpus here. (A groupby would send every n-gram through a
shuffle.) It knows no files and computes no figures.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import pyarrow as pa
import ray.data

from tasc_jobs.errors import RaySetupError
from tasc_jobs.redis_source import RedisCorpusSource
from tasc_jobs.stages import StageProgress
from tasc_jobs.statistics.ngrams import NgramCounts, NgramTotal
from tasc_jobs.statistics.units import SIDES, WORDS, Units

_ROWS_PER_TASK = 20_000
_BATCH_ROWS, _BATCH_BYTES = 5_000, 4 << 20
_COUNTS = pa.schema(
    [
        ("side", pa.string()),
        ("unit", pa.string()),
        ("ngram", pa.string()),  # either this
        ("length", pa.int64()),  # or this is null
        ("count", pa.int64()),
    ]
)
SideCounts: TypeAlias = Mapping[tuple[str, str], NgramCounts]
"""By side and unit."""


def count_corpus(
    url: str, task: str, units: Units, parallelism: int | None, progress: StageProgress
) -> SideCounts:
    """Counts of each side, in each unit.

    Args:
        progress: Told of one stage, ``count``.

    Raises:
        RaySetupError: Ray is not running in this process.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    if not ray.is_initialized():
        # Ray Data would start a cluster of its own, one that listens on every interface.
        raise RaySetupError("no Ray is running; start one with tasc_jobs.ray_local.local_ray()")
    source = RedisCorpusSource(url, task, previous_words=units.n - 1)
    row_bytes = max(source.estimate_inmemory_data_size() // source.rows, 1)
    counted = ray.data.read_datasource(
        source, override_num_blocks=parallelism or -(-source.rows // _ROWS_PER_TASK)
    ).map_batches(
        functools.partial(count_rows, units),
        batch_format="pyarrow",
        batch_size=max(min(_BATCH_ROWS, _BATCH_BYTES // row_bytes), 1),
    )
    progress("count", 0, source.rows)
    tables = counted.iter_batches(batch_format="pyarrow", batch_size=None)
    return sum_tables(tables, units, lambda done: progress("count", done, source.rows))


def count_rows(units: Units, table: pa.Table) -> pa.Table:
    """Rows of a `RedisCorpusSource` -> a table of their counts.

    Every row brings the words in front of it, so however they are cut will do.
    """
    return pa.concat_tables(
        _encoded(side, unit, _counts_of(table, side, unit, units))
        for side in SIDES
        for unit in units.orders
    )


def sum_tables(
    tables: Iterable[pa.Table], units: Units, counted: Callable[[int], None]
) -> SideCounts:
    """The sum of tables of counts; after each, the rows counted so far are told."""
    totals = {(side, unit): NgramTotal() for side in SIDES for unit in units.orders}
    rows = 0
    for table in tables:
        for side, unit, ngram, length, count in zip(
            *(column.to_pylist() for column in table.columns), strict=True
        ):
            if ngram is not None:
                totals[side, unit].add_ngram(ngram, count)
                continue
            totals[side, unit].add_length(length, count)
            if (side, unit) == (SIDES[0], WORDS):
                rows += count
        counted(rows)
    return {key: total.counts() for key, total in totals.items()}


def _counts_of(table: pa.Table, side: str, unit: str, units: Units) -> NgramCounts:
    total, n = NgramTotal(), units.orders[unit]
    befores = table[f"previous_{side}"].to_pylist() if n > 1 else [""] * table.num_rows
    symbols = units.symbols(unit, table[side].to_pylist())
    for row, before in zip(symbols, befores, strict=True):
        total.add_row(row, n, before)
    return total.counts()


def _encoded(side: str, unit: str, counts: NgramCounts) -> pa.Table:
    """One row for each n-gram, and one for each length."""
    ngrams, lengths = counts.ngrams, counts.lengths
    rows = len(ngrams) + len(lengths)
    columns = [
        [side] * rows,
        [unit] * rows,
        [*ngrams, *[None] * len(lengths)],
        [*[None] * len(ngrams), *lengths],
        [*ngrams.values(), *lengths.values()],
    ]
    return pa.table(columns, schema=_COUNTS)
