"""Tests the read tasks of a corpus in a real Redis, and their counts, without a cluster."""

import random
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import write_rows
from tasc_jobs.demo.tasks import MODEL
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.index.redis_source import RedisCorpusSource
from tasc_jobs.statistics.corpus_counts import TableSum, count_rows, split
from tasc_jobs.statistics.ngrams import Units, joined
from tasc_jobs.statistics.task_statistics import file_statistics, statistics_of
from tasc_store import CorpusRow, CorpusStore

pytestmark = pytest.mark.redis


ROWS = [CorpusRow(f"k{n}", "" if n % 5 else f"a{n} b{n}", f"c{n}") for n in range(23)]


@pytest.fixture
def corpus(client, task):
    store = CorpusStore(client, task)
    store.append(ROWS)
    return store


def tables(source, parallelism, **settings):
    return [list(read()) for read in source.get_read_tasks(parallelism, **settings)]


def whole(found):
    return pa.concat_tables([table for part in found for table in part]).to_pylist()


@pytest.mark.parametrize("parallelism", [1, 3, 23, 1000])
def test_parallel_reads_cover_the_corpus_in_order(redis_url, task, corpus, parallelism):
    source = RedisCorpusSource(redis_url, task, batch_rows=4)
    found = tables(source, parallelism)
    assert len(found) == min(parallelism, 23)
    assert all(0 < table.num_rows <= 4 for part in found for table in part)
    assert whole(found) == [
        {"ordinal": n, "key": row.key, "input": row.input, "output": row.output}
        for n, row in enumerate(ROWS)
    ]


def test_long_rows_are_read_a_few_at_a_time(redis_url, task, client):
    store, long = CorpusStore(client, task), "x" * 20_000
    for at in range(0, 2000, 500):
        rows = [CorpusRow(f"{i}", "", long if i >= 500 else "x") for i in range(at, at + 500)]
        store.append(rows)
    (found,) = tables(RedisCorpusSource(redis_url, task), 1)
    sizes = [table.num_rows for table in found]
    assert sizes[:2] == [500, 1000]  # the rows before the second call are short
    assert all(table.nbytes < 5 << 20 for table in found[2:])
    assert [row["ordinal"] for row in whole([found])] == list(range(2000))


def test_ray_read_tasks_report_their_rows_and_bytes(redis_url, task, corpus):
    found = tables(RedisCorpusSource(redis_url, task, batch_rows=2), 2, per_task_row_limit=3)
    assert [sum(table.num_rows for table in part) for part in found] == [3, 3]
    source = RedisCorpusSource(redis_url, task)
    reported = [read.metadata for read in source.get_read_tasks(3)]
    assert sum(metadata.num_rows for metadata in reported) == 23
    assert sum(metadata.size_bytes for metadata in reported) == pytest.approx(
        source.estimate_inmemory_data_size(), abs=3
    )
    assert source.estimate_inmemory_data_size() > 23 * 8
    source = RedisCorpusSource(redis_url, task)
    corpus.append([CorpusRow("later", "x", "y")])
    assert [row["key"] for row in whole(tables(source, 2))] == [row.key for row in ROWS]
    assert RedisCorpusSource(redis_url, task).rows == 24


def test_empty_or_vanished_corpus_is_an_error(redis_url, task, corpus, client):
    source = RedisCorpusSource(redis_url, task)
    client.delete(*client.keys(f"*{task}*"))
    with pytest.raises(EmptyCorpusError):
        tables(source, 2)
    with pytest.raises(EmptyCorpusError):
        RedisCorpusSource(redis_url, task)


WORDS = ["a", "b", "c", "naïve", "日本"]


@pytest.fixture
def rows(client, task, tmp_path):
    """A random corpus in Redis, and the same rows as a file."""
    rng = random.Random(7)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(5))) for _ in range(120)]
    pairs = [(texts[i], f"{texts[i + 60]} {WORDS[i % 3]}") for i in range(60)]
    CorpusStore(client, task).append([CorpusRow(str(i), *pair) for i, pair in enumerate(pairs)])
    return write_rows(tmp_path / "rows.jsonl", [{"input": i, "output": o} for i, o in pairs])


def sum_of(tables, units):
    total = TableSum(units)
    for table in tables:
        total.add(table)
    return total


@settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (4, 60, 30, 9))),
    across=st.booleans(),
    rng=st.randoms(),
)
def test_statistics_of_corpus_parts_sum_to_the_statistics_of_the_file(
    redis_url, task, rows, sizes, across, rng
):
    n, parts, batch_rows, partitions = sizes
    units = Units.of(n, MODEL, across_rows=across)
    words = units.words_before
    source = RedisCorpusSource(redis_url, task, batch_rows=batch_rows, previous_words=words)
    read = [table for part in source.get_read_tasks(parts) for table in part()]
    counted = list(map(partial(count_rows, units, partitions), read))
    rng.shuffle(counted)
    lengths, *by_partition = zip(*(split(table, partitions) for table in counted), strict=True)
    lengths = sum_of(lengths, units)
    assert lengths.rows == 60
    found = lengths.histograms()
    for own in by_partition:
        part = sum_of(own, units).histograms()
        found = {key: joined(found[key], part[key]) for key in found}
    whole = sum_of(counted, units)
    assert (whole.rows, whole.histograms()) == (60, found)
    assert statistics_of(found, units) == file_statistics([rows], units)
