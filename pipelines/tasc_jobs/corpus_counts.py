"""The bigrams of a corpus in Redis, counted by Ray Data: each block where it is read, the sum here.

Between the two travel tables of counts, so memory here grows with the *unique* bigrams only. (A
groupby would send every bigram through a shuffle.) It knows no files and computes no statistics.
"""

from collections.abc import Callable, Iterable

import pyarrow as pa
import ray.data

from tasc_jobs.bigrams import BigramCounts, BigramTotal, count_bigrams, merge
from tasc_jobs.errors import RaySetupError
from tasc_jobs.redis_source import RedisCorpusSource
from tasc_jobs.stages import StageProgress

SIDES = ("input", "output")
_ROWS_PER_TASK = 20_000
_BATCH_ROWS = 5_000
_ROWS = "rows"  # not a side: how many rows a table of counts comes from
_COUNTS = pa.schema(
    [
        ("side", pa.string()),
        ("first", pa.string()),
        ("second", pa.string()),
        ("count", pa.int64()),
    ]
)


def count_corpus(
    url: str, task: str, parallelism: int | None, progress: StageProgress
) -> tuple[dict[str, BigramCounts], int]:
    """Counts of each side, and the number of rows they come from.

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
    source = RedisCorpusSource(url, task, previous_words=True)
    blocks = parallelism or -(-source.rows // _ROWS_PER_TASK)
    counted = ray.data.read_datasource(source, override_num_blocks=blocks).map_batches(
        _count_rows, batch_format="pyarrow", batch_size=_BATCH_ROWS
    )
    progress("count", 0, source.rows)
    tables = counted.iter_batches(batch_format="pyarrow", batch_size=None)
    return _sum(tables, lambda done: progress("count", done, source.rows)), source.rows


def _count_rows(table: pa.Table) -> pa.Table:
    """Rows -> their counts. Every row brings its previous word, so however they are cut will do."""
    counts = [_encoded(side, _counts_of(table, side)) for side in SIDES]
    done = pa.table([[_ROWS], [None], [None], [table.num_rows]], schema=_COUNTS)
    return pa.concat_tables([*counts, done])


def _counts_of(table: pa.Table, side: str) -> BigramCounts:
    texts, previous = table[side].to_pylist(), table[f"previous_{side}"].to_pylist()
    return merge(count_bigrams([t], before) for t, before in zip(texts, previous, strict=True))


def _encoded(side: str, counts: BigramCounts) -> pa.Table:
    """One row for each pair, and one without a pair that carries the number of words."""
    columns = [
        [side] * (1 + len(counts.pairs)),
        [None, *(first for first, _ in counts.pairs)],
        [None, *(second for _, second in counts.pairs)],
        [counts.words, *counts.pairs.values()],
    ]
    return pa.table(columns, schema=_COUNTS)


def _sum(tables: Iterable[pa.Table], counted: Callable[[int], None]) -> dict[str, BigramCounts]:
    totals, rows = {side: BigramTotal() for side in SIDES}, 0
    for table in tables:
        for side, first, second, count in zip(*(c.to_pylist() for c in table.columns), strict=True):
            if side == _ROWS:
                rows += count
            elif first is None:
                totals[side].add_words(count)
            else:
                totals[side].add_pair((first, second), count)
        counted(rows)
    return {side: total.counts() for side, total in totals.items()}
