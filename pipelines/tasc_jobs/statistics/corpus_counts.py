"""Counts the n-grams of a corpus in Redis with Ray Data, and sums them by partition in Ray tasks.

Each block of rows becomes a table of counts, with the partition of every n-gram, and a task splits
the table by partition. The parts stay in Ray's object store, which spills to disk if it is full.
Then a task per partition reads its parts, one at a time, sums them, and returns a histogram.

Memory therefore grows with the number of *different* n-grams of a partition. This process holds
histograms and row lengths. It does not keep the tables themselves: Ray Data counts kept blocks
against its share of the object store, and would soon run one task at a time.
"""

import functools
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
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
from tasc_jobs.words import one_encoding_thread
from tasc_runtime.progress import StageProgress

_COUNTS = pa.schema(
    [
        ("total", pa.int8()),  # the place of its side and unit in `CorpusTotal.totals`
        ("ngram", pa.large_string()),  # null in rows that count a length, like the partition
        ("partition", pa.int32()),
        ("length", pa.int64()),  # null in rows that count an n-gram
        ("count", pa.int64()),
    ]
)
Histograms: TypeAlias = Mapping[tuple[str, str], NgramHistogram]
"""Histograms by side and unit."""
_LEAST_ROWS, _MOST_BYTES = 20_000, 32 << 20  # of a range
# N-grams of n words take n times the bytes of the text. To sum this many bytes, all of them of
# different n-grams, takes about half a gigabyte. Smaller partitions need less memory, but more
# objects.
_PARTITION_BYTES, _LEAST_PARTITIONS, _MOST_PARTITIONS = 64 << 20, 8, 256
# Ray keeps objects below 100 KiB in this process, so small tables are split together, into larger
# parts.
_PART_BYTES = 128 << 10
_BLOCK_BYTES = 8 << 20  # of rows that are counted at a time, and of a table of counts
_RETRIES = 3
_Block: TypeAlias = "ray.ObjectRef[pa.Table]"


def count_corpus(
    url: str, task: str, units: Units, parallelism: int | None, progress: StageProgress
) -> Histograms:
    """Returns how often n-grams occur, by side and unit.

    Args:
        parallelism: Number of ranges to read and of partitions to sum. By default, the ranges are
            those of `RedisCorpusSource.ranges` of 20,000 rows or more and of up to 32 MiB. There
            is a partition for every 64 MiB of n-grams, but at most 256, and at least 8 or one for
            each range. A single partition is summed in this process.
        progress: Called for the stage ``count`` and, with several partitions, for ``sum``.

    Raises:
        RaySetupError: Ray is not running in this process.
        ClusterError: The workers died repeatedly.
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """
    require_ray()
    source = RedisCorpusSource(url, task, previous_words=units.words_before)
    ranges = min(parallelism or source.ranges(_LEAST_ROWS, _MOST_BYTES), source.rows)
    ngram_bytes = source.estimate_inmemory_data_size() * units.n
    partitions = ranges if parallelism else partitions_for(ngram_bytes, ranges)
    progress("count", 0, source.rows)
    here, split_tables = TableSum(units), list[Sequence[_Block]]()
    with closing(_count_tables(source, units, ranges, partitions)) as tables:
        unsplit = ((ray.get(table), ()) for table, _ in tables)
        for table, parts in split_by_partition(tables, partitions) if partitions > 1 else unsplit:
            here.add(table)
            split_tables.append(parts)
            progress("count", here.rows, source.rows)
    found = here.histograms()
    if partitions == 1:
        return found
    by_partition = deque(zip(*split_tables, strict=True))
    del split_tables, parts  # Ray frees the parts of a partition when it is summed
    progress("sum", 0, partitions)
    for done, part in enumerate(partition_sums(by_partition, units), 1):
        found = {key: joined(found[key], part[key]) for key in found}
        progress("sum", done, partitions)
    return found


def _count_tables(
    source: RedisCorpusSource, units: Units, ranges: int, partitions: int
) -> Generator[tuple[_Block, int]]:
    """Yields tables of counts and their bytes."""
    # Without a batch size, Ray Data reads and counts in one task, and stores no rows.
    counted = ray.data.read_datasource(source, override_num_blocks=ranges).map_batches(
        functools.partial(count_rows, units, partitions), batch_format="pyarrow", batch_size=None
    )
    counted.context.target_max_block_size = _BLOCK_BYTES
    # Ray keeps a block while a reference to it exists.
    for bundle in counted.iter_internal_ref_bundles():
        for block, metadata in zip(bundle.block_refs, bundle.metadata, strict=True):
            yield block, metadata.size_bytes or 0


def split_by_partition(
    tables: Iterable[tuple[_Block, int]], partitions: int
) -> Iterator[tuple[pa.Table, Sequence[_Block]]]:
    """Yields the lengths of some tables at a time, and their n-grams of each partition.

    Args:
        tables: Tables of counts and their bytes.

    Raises:
        ClusterError: The workers died repeatedly.
        RayError: A task failed for another reason.
    """
    splitting = _split_task.options(num_returns=partitions + 1)
    waiting = dict[_Block, Sequence[_Block]]()

    def ended(count: int, timeout_s: float | None) -> Iterator[tuple[pa.Table, Sequence[_Block]]]:
        for lengths in ray.wait(list(waiting), num_returns=count, timeout=timeout_s)[0]:
            yield _got(lengths, "split tables of n-grams"), waiting.pop(lengths)

    for some in _together(tables, partitions * _PART_BYTES):
        parts: Any = splitting.remote(partitions, *some)
        waiting[parts[0]] = parts[1:]
        del some  # Ray Data counts blocks as long as there are references to them
        yield from ended(len(waiting), 0)
    while waiting:
        yield from ended(1, None)


def _together(tables: Iterable[tuple[_Block, int]], least_bytes: int) -> Iterator[list[_Block]]:
    """Yields lists of tables that have ``least_bytes`` together; the last may have fewer."""
    some, size = list[_Block](), 0
    for table, table_bytes in tables:
        some.append(table)
        size += table_bytes
        if size >= least_bytes:
            yield some
            some, size = [], 0
    if some:
        yield some


def partition_sums(partitions: deque[Sequence[_Block]], units: Units) -> Iterator[Histograms]:
    """Yields the histograms of the tables of each partition, in any order.

    At most as many tasks as the cluster has CPUs run at a time.

    Args:
        partitions: The tables of each partition, which are removed.

    Raises:
        ClusterError: The workers died repeatedly.
        RayError: A task failed for another reason.
    """
    at_a_time = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    running: list[ray.ObjectRef[Histograms]] = []
    while partitions or running:
        while partitions and len(running) < at_a_time:
            running.append(sum_tables.remote(partitions.popleft(), units))
        (ended,), running = ray.wait(running)
        yield _got(ended, "sum the different n-grams of a partition")


_T = TypeVar("_T")


def _got(found: "ray.ObjectRef[_T]", work: str) -> _T:
    try:
        return ray.get(found)
    except (WorkerCrashedError, OutOfMemoryError) as error:
        raise ClusterError(
            f"the workers that {work} died repeatedly ({in_short(error)}); "
            "give Ray's machines more memory"
        ) from error


@ray.remote(num_cpus=1, max_retries=_RETRIES)
def _split_task(partitions: int, *tables: pa.Table) -> list[pa.Table]:
    return split(pa.concat_tables(tables), partitions)


@ray.remote(num_cpus=1, max_retries=_RETRIES)
def sum_tables(tables: Sequence[_Block], units: Units) -> Histograms:
    """Sums tables of counts, with one at a time in memory."""
    total = TableSum(units)
    for table in tables:
        total.add(ray.get(table))
    return total.histograms()


def count_rows(units: Units, partitions: int, table: pa.Table) -> pa.Table:
    """Returns the table of counts of some rows of a `RedisCorpusSource`.

    With ``units.across_rows``, each row comes with the words before it, so the counts do not depend
    on how rows are batched.
    """
    one_encoding_thread()
    total = CorpusTotal(units)
    total.add_rows(table)
    return pa.concat_tables(
        _encoded(place, counts, partitions) for place, counts in enumerate(total.totals.values())
    )


def partitions_for(ngram_bytes: int, ranges: int) -> int:
    """Returns the usual number of partitions of a corpus."""
    wanted = max(-(-ngram_bytes // _PARTITION_BYTES), min(ranges, _LEAST_PARTITIONS))
    return min(wanted, _MOST_PARTITIONS)


def partition_of(ngram: str, partitions: int) -> int:
    """Returns the partition of an n-gram, equal in all processes, unlike the `hash` of a string."""
    return zlib.crc32(ngram.encode()) % partitions


def split(table: pa.Table, partitions: int) -> list[pa.Table]:
    """Returns the rows of a table of counts for lengths, and those for n-grams by partition."""
    places = table["partition"].fill_null(-1).to_numpy() + 1
    ends = np.cumsum(np.bincount(places, minlength=partitions + 1))
    order, whole = np.argsort(places, kind="stable"), table.combine_chunks()
    return [whole.take(order[begin:end]) for begin, end in pairwise([0, *ends])]


class TableSum(CorpusTotal):
    """A running sum of tables of counts; memory grows with the number of different n-grams."""

    def add(self, table: pa.Table) -> None:
        for place, total in enumerate(self.totals.values()):
            own = table.filter(pc.equal(table["total"], place))
            is_length = pc.is_valid(own["length"])
            lengths, ngrams = own.filter(is_length), own.filter(pc.invert(is_length))
            total.add_ngrams(ngrams["ngram"], ngrams["count"])
            total.add_lengths(lengths["length"], lengths["count"])


def _encoded(place: int, total: NgramTotal, partitions: int) -> pa.Table:
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
    return whole.set_column(0, "total", pa.repeat(pa.scalar(place, pa.int8()), len(whole)))
