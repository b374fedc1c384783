"""Counts the n-grams of a corpus in Redis with Ray Data, and sums them by partition in Ray tasks.

Each batch of rows becomes a table of counts, with the partition of every n-gram. The tables stay in
Ray's object store, which spills to disk if it is full. Then a task per partition reads all tables,
one at a time, sums the n-grams of its partition, and returns a histogram.

Memory therefore grows with the number of *different* n-grams of a batch, or of a partition. This
process holds only histograms and row lengths. Each task filters every table, which is cheap as long
as there are few partitions; a groupby would send each n-gram through a shuffle. The number of
partitions therefore depends on the corpus's bytes, and is far below the number of ranges.
"""

import functools
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import ray.data
from ray.exceptions import OutOfMemoryError, WorkerCrashedError

from tasc_jobs.errors import ClusterError, in_short
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.ray_local import require_ray
from tasc_jobs.statistics.ngrams import (
    CorpusTotal,
    NgramHistogram,
    NgramTotal,
    Units,
    joined,
)
from tasc_runtime.progress import StageProgress

_COUNTS = pa.schema(
    [
        ("side", pa.string()),
        ("unit", pa.string()),
        ("ngram", pa.large_string()),  # null in rows that count a length, like the partition
        ("partition", pa.int32()),
        ("length", pa.int64()),  # null in rows that count an n-gram
        ("count", pa.int64()),
    ]
)
Histograms: TypeAlias = Mapping[tuple[str, str], NgramHistogram]
"""Histograms by side and unit."""
_ROWS_PER_TASK = 20_000
# N-grams of n words take n times the bytes of the text. To sum this many bytes, all of them of
# different n-grams, takes about half a gigabyte. Smaller partitions need less memory, but each
# reads all tables, which a large corpus spills to disk.
_PARTITION_BYTES, _LEAST_PARTITIONS = 64 << 20, 8
_BATCH_ROWS, _BATCH_BYTES = 5_000, 4 << 20
_RETRIES = 3
_Block: TypeAlias = "ray.ObjectRef[pa.Table]"


def count_corpus(
    url: str, task: str, units: Units, parallelism: int | None, progress: StageProgress
) -> Histograms:
    """Returns how often n-grams occur, by side and unit.

    Args:
        parallelism: Number of ranges to read and of partitions to sum. By default, there is a
            range for every 20,000 rows, and a partition for every 64 MiB of n-grams, but as many
            as ranges up to 8. A single partition is summed in this process.
        progress: Called for the stage ``count`` and, with several partitions, for ``sum``.

    Raises:
        RaySetupError: Ray is not running in this process.
        ClusterError: The workers that sum a partition died repeatedly.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    require_ray()
    source = RedisCorpusSource(url, task, previous_words=units.words_before)
    ranges = min(parallelism or -(-source.rows // _ROWS_PER_TASK), source.rows)
    ngram_bytes = source.estimate_inmemory_data_size() * units.n
    partitions = ranges if parallelism else partitions_for(ngram_bytes, ranges)
    progress("count", 0, source.rows)
    here, kept = TableSum(units), list[_Block]()
    for block in _count_tables(source, units, ranges, partitions):
        table = ray.get(block)
        if partitions > 1:
            kept.append(block)
            table = lengths_in(table)
        here.add(table)
        progress("count", here.rows, source.rows)
    found = here.histograms()
    if partitions == 1:
        return found
    progress("sum", 0, partitions)
    for done, part in enumerate(partition_sums(kept, units, partitions), 1):
        found = {key: joined(found[key], part[key]) for key in found}
        progress("sum", done, partitions)
    return found


def _count_tables(
    source: RedisCorpusSource, units: Units, ranges: int, partitions: int
) -> Iterator[_Block]:
    row_bytes = max(source.estimate_inmemory_data_size() // source.rows, 1)
    counted = ray.data.read_datasource(source, override_num_blocks=ranges).map_batches(
        functools.partial(count_rows, units, partitions),
        batch_format="pyarrow",
        batch_size=max(min(_BATCH_ROWS, _BATCH_BYTES // row_bytes), 1),
    )
    # Ray keeps a block while a reference to it exists.
    for bundle in counted.iter_internal_ref_bundles():
        yield from bundle.block_refs


def partition_sums(tables: Sequence[_Block], units: Units, partitions: int) -> Iterator[Histograms]:
    """Yields the histograms of each partition of the tables, in any order, without lengths.

    At most as many tasks as the cluster has CPUs run at a time.

    Raises:
        ClusterError: The workers of a partition died repeatedly.
        RayError: A task failed for another reason.
    """
    listed = ray.put(tables)  # sent once, not with every task
    at_a_time = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    waiting = deque(range(partitions))
    running: list[ray.ObjectRef[Histograms]] = []
    while waiting or running:
        while waiting and len(running) < at_a_time:
            running.append(sum_partition.remote(listed, units, waiting.popleft()))
        (ended,), running = ray.wait(running)
        try:
            yield ray.get(ended)
        except (WorkerCrashedError, OutOfMemoryError) as error:
            raise ClusterError(
                f"the workers that sum one of {partitions} partitions of the n-grams died "
                f"repeatedly ({in_short(error)}); each worker holds the different n-grams of a "
                "partition, so give Ray's machines more memory"
            ) from error


@ray.remote(num_cpus=1, max_retries=_RETRIES)
def sum_partition(tables: Sequence[_Block], units: Units, partition: int) -> Histograms:
    """Sums the n-grams of one partition, with one table at a time in memory."""
    total = TableSum(units)
    for table in tables:
        total.add(ngrams_in(ray.get(table), partition))
    return total.histograms()


def count_rows(units: Units, partitions: int, table: pa.Table) -> pa.Table:
    """Returns the table of counts of some rows of a `RedisCorpusSource`.

    With ``units.across_rows``, each row comes with the words before it, so the counts do not depend
    on how rows are batched.
    """
    total = CorpusTotal(units)
    total.add_rows(table)
    return pa.concat_tables(
        _encoded(side, unit, counts, partitions) for (side, unit), counts in total.totals.items()
    )


def partitions_for(ngram_bytes: int, ranges: int) -> int:
    """Returns the usual number of partitions of a corpus, at most one for each range."""
    return min(ranges, max(-(-ngram_bytes // _PARTITION_BYTES), _LEAST_PARTITIONS))


def partition_of(ngram: str, partitions: int) -> int:
    """Returns the partition of an n-gram, equal in all processes, unlike the `hash` of a string."""
    return zlib.crc32(ngram.encode()) % partitions


def ngrams_in(table: pa.Table, partition: int) -> pa.Table:
    """Returns the rows of a table of counts for n-grams of this partition."""
    return table.filter(pc.equal(table["partition"], partition))


def lengths_in(table: pa.Table) -> pa.Table:
    """Returns the rows of a table of counts for lengths."""
    return table.filter(pc.is_valid(table["length"]))


class TableSum(CorpusTotal):
    """A running sum of tables of counts; memory grows with the number of different n-grams."""

    def add(self, table: pa.Table) -> None:
        for (side, unit), total in self.totals.items():
            is_own = pc.and_(pc.equal(table["side"], side), pc.equal(table["unit"], unit))
            own = table.filter(is_own)
            lengths, ngrams = lengths_in(own), own.filter(pc.is_valid(own["ngram"]))
            total.add_ngrams(ngrams["ngram"], ngrams["count"])
            total.add_lengths(lengths["length"], lengths["count"])


def _encoded(side: str, unit: str, total: NgramTotal, partitions: int) -> pa.Table:
    """Returns a table of counts: one row for each n-gram, and one for each length."""
    ngrams = total.ngrams()
    places = [partition_of(ngram, partitions) for ngram in ngrams["ngram"].to_numpy()]
    lengths = [pa.array(each, pa.int64()) for each in (total.lengths, total.lengths.values())]
    parts = (
        _COUNTS.empty_table(),
        ngrams.append_column("partition", pa.array(places, pa.int32())),
        pa.table(lengths, names=["length", "count"]),
    )
    whole = pa.concat_tables(parts, promote_options="default")
    named = whole.set_column(0, "side", pa.repeat(side, len(whole)))
    return named.set_column(1, "unit", pa.repeat(unit, len(whole)))
