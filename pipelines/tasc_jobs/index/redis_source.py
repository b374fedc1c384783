"""A task's corpus in Redis as a Ray Data source: contiguous ranges, read in parallel.

Each read task opens its own connection.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import pairwise

import pyarrow as pa
import ray
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.words import SIDES, with_previous_words
from tasc_store import CorpusRow, CorpusStore, connect
from tasc_text.template import last_words

_SAMPLED_ROWS = 100
_RANGES_PER_CPU = 4
_FIRST_ROWS, _BATCH_ROWS, _BATCH_BYTES = 500, 5_000, 4 << 20
_ROW = [
    ("ordinal", pa.int64()),
    ("key", pa.string()),
    ("input", pa.string()),
    ("output", pa.string()),
]


class RedisCorpusSource(Datasource):
    """Rows ``[0, rows)`` of a corpus.

    ``rows`` is the length of the corpus at the start; rows that are appended later are not read.

    Columns: ordinal (int64, the position in the corpus), key, input, output (string). With
    ``previous_words`` there are also previous_input and previous_output: the last words before this
    row on that side, joined by blanks, up to ``previous_words`` of them.

    Args:
        url: Address of Redis, as every read task can reach it.
        task: Name of the corpus's task.
        batch_rows: Maximum number of rows read from Redis in one call, and in one table. The first
            call of a task reads up to 500, and each further one up to twice as many as the last,
            or as many as have 4 MiB if they are as long as the last ones. Redis walks to the first
            row of each call, so small calls are slow.
        previous_words: Number of previous words; with 0, their columns are omitted.

    Raises:
        EmptyCorpusError: There are no rows.
        StoreError: Redis fails.
    """

    def __init__(
        self, url: str, task: str, *, batch_rows: int = _BATCH_ROWS, previous_words: int = 0
    ) -> None:
        super().__init__()
        with closing(connect(url)) as client:
            store = CorpusStore(client, task)
            self.rows = len(store)
            sample = store.read(0, _SAMPLED_ROWS)
        if not sample:
            raise EmptyCorpusError(f"the corpus of task {task!r} has no rows; ingest some first")
        self._row_bytes = sum(_bytes(row) for row in sample) / len(sample)
        self._read = partial(_read, url, task, batch_rows, previous_words)

    def estimate_inmemory_data_size(self) -> int:
        """Returns the size in bytes, estimated from the first rows."""
        return round(self.rows * self._row_bytes)

    def ranges(self, least_rows: int, most_bytes: int) -> int:
        """Returns the usual number of ranges, for a job on this cluster.

        Ray Data starts a task up to 0.2 s after the task before it has ended, so ranges should be
        large. But all CPUs should end at about the same time, so each CPU has the same number of
        ranges, and at least four if there are enough rows.

        Args:
            least_rows: Ranges have about this number of rows or more, unless rows are long.
            most_bytes: The maximum size of a range, judged by the first rows.
        """
        cpus = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        by_bytes = -(-self.estimate_inmemory_data_size() // most_bytes)
        found = max(min(_RANGES_PER_CPU * cpus, self.rows // least_rows), by_bytes, 1)
        return min(found if found < cpus else found + -found % cpus, self.rows)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """Returns ``parallelism`` ranges of nearly equal length that cover the corpus.

        No range is empty.
        """
        parts = min(parallelism, self.rows)
        borders = [self.rows * part // parts for part in range(parts + 1)]
        return [
            ReadTask(
                partial(self._read, start, stop),
                self._metadata(stop - start),
                per_task_row_limit=per_task_row_limit,
            )
            for start, stop in pairwise(borders)
        ]

    def _metadata(self, rows: int) -> BlockMetadata:
        return BlockMetadata(
            num_rows=rows,
            size_bytes=round(rows * self._row_bytes),
            input_files=None,
            exec_stats=None,
        )


def _bytes(row: CorpusRow) -> int:
    return 8 + len(f"{row.key}{row.input}{row.output}".encode())


def _read(
    url: str, task: str, batch_rows: int, previous_words: int, start: int, stop: int
) -> Iterator[pa.Table]:
    """Yields rows ``[start, stop)`` as tables of at most ``batch_rows`` rows."""
    with closing(connect(url)) as client:
        store = CorpusStore(client, task)
        before = _words_before(store, start, batch_rows, previous_words)
        first, count = start, min(batch_rows, _FIRST_ROWS)
        while first < stop:
            rows = store.read(first, min(first + count, stop))
            if len(rows) < min(count, stop - first):
                raise EmptyCorpusError(
                    f"the corpus of task {task!r} shrank below {stop} rows while it was read; "
                    "run the job again when the task is not being deleted"
                )
            table = _table(rows, first)
            first += len(rows)
            most = min(batch_rows, 2 * count, count * _BATCH_BYTES // table.nbytes)
            count = max(most, 1)
            if previous_words:
                table, before = with_previous_words(table, before, previous_words)
            yield table


def _table(rows: list[CorpusRow], first: int) -> pa.Table:
    columns = [
        range(first, first + len(rows)),
        [row.key for row in rows],
        [row.input for row in rows],
        [row.output for row in rows],
    ]
    return pa.table(columns, schema=pa.schema(_ROW))


def _words_before(store: CorpusStore, ordinal: int, batch_rows: int, count: int) -> dict[str, str]:
    """Returns the last words of both sides before a position; reads backwards while necessary."""
    found = dict.fromkeys(SIDES, "")
    size = 1
    while ordinal > 0 and any(len(words.split()) < count for words in found.values()):
        for row in reversed(store.read(max(0, ordinal - size), ordinal)):
            for side, words in found.items():
                found[side] = last_words(f"{getattr(row, side)} {words}", count)
        ordinal, size = max(0, ordinal - size), min(2 * size, batch_rows)
    return found
