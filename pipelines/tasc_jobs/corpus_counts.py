"""The bigrams of a corpus in Redis, counted by Ray Data: each block where it is read, the sum here.

Between the two travel tables of counts, so memory here grows with the *unique* bigrams only. (A
groupby would send every bigram through a shuffle.) It knows no files and computes no statistics.
"""

from collections.abc import Iterable

import pyarrow as pa
import ray.data

from tasc_jobs.bigrams import BigramCounts, BigramTotal, count_bigrams, merge
from tasc_jobs.errors import RaySetupError
from tasc_jobs.redis_source import RedisCorpusSource

SIDES = ("input", "output")
_ROWS_PER_TASK = 20_000
_BATCH_ROWS = 5_000
_COUNTS = pa.schema(
    [
        ("side", pa.string()),
        ("first", pa.string()),
        ("second", pa.string()),
        ("count", pa.int64()),
    ]
)


def count_corpus(
    url: str, task: str, parallelism: int | None
) -> tuple[dict[str, BigramCounts], int]:
    """Counts of each side, and the number of rows they come from.

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
    return _sum(counted.iter_batches(batch_format="pyarrow", batch_size=None)), source.rows


def _count_rows(table: pa.Table) -> pa.Table:
    """Rows -> their counts. Every row brings its previous word, so however they are cut will do."""
    return pa.concat_tables([_encoded(side, _counts_of(table, side)) for side in SIDES])


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


def _sum(tables: Iterable[pa.Table]) -> dict[str, BigramCounts]:
    totals = {side: BigramTotal() for side in SIDES}
    for table in tables:
        for side, first, second, count in zip(*(c.to_pylist() for c in table.columns), strict=True):
            if first is None:
                totals[side].add_words(count)
            else:
                totals[side].add_pair((first, second), count)
    return {side: total.counts() for side, total in totals.items()}
