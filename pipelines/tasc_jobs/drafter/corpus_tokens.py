"""How often each token stands in the outputs of a corpus in Redis, counted by Ray Data.

Each block is counted where it is read; one row of counts a batch travels. It knows no files.
"""

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from tasc_jobs.drafter.token_counts import (
    BATCH_ROWS,
    TokenCounts,
    TokenizerOf,
    count_texts,
    open_tokens,
)
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.runtime.ray_local import require_ray
from tasc_jobs.runtime.stages import StageProgress

_ROWS_PER_TASK = 20_000


def count_corpus(
    url: str,
    task: str,
    named: TokenizerOf,
    parallelism: int | None,
    progress: StageProgress,
    *,
    keys: str = "",
) -> TokenCounts:
    """Counts of all outputs.

    Args:
        parallelism: Ranges to read it in; by default one for every 20,000 rows.
        progress: Told of one stage, ``count``.
        keys: Count only rows whose key begins so.

    Raises:
        RaySetupError: Ray is not running in this process.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    require_ray()
    source = RedisCorpusSource(url, task)
    counted = ray.data.read_datasource(
        source, override_num_blocks=parallelism or -(-source.rows // _ROWS_PER_TASK)
    ).map_batches(
        functools.partial(count_rows, named, keys),
        batch_format="pyarrow",
        batch_size=BATCH_ROWS,
    )
    total = TokenCounts(open_tokens(named).vocab_size)
    progress("count", 0, source.rows)
    for table in counted.iter_batches(batch_format="pyarrow", batch_size=None):
        add_tables(total, table)
        progress("count", total.read, source.rows)
    return total


def count_rows(named: TokenizerOf, keys: str, table: pa.Table) -> pa.Table:
    """Rows of a `RedisCorpusSource` -> one row of their counts."""
    outputs = table["output"].filter(pc.starts_with(table["key"], keys))
    ids, counts = count_texts(open_tokens(named), outputs.to_pylist())
    return pa.table(
        {
            "ids": pa.array([ids], pa.list_(pa.int32())),
            "counts": pa.array([counts], pa.list_(pa.int64())),
            "read": [table.num_rows],
            "rows": [len(outputs)],
        }
    )


def add_tables(total: TokenCounts, table: pa.Table) -> None:
    """Add what `count_rows` made of some batches."""
    for ids, counts, read, rows in zip(*table.columns, strict=True):
        total.add(np.asarray(ids.values), np.asarray(counts.values), read.as_py(), rows.as_py())
