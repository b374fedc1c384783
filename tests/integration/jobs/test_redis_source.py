"""The read tasks of a corpus in a real Redis; they run here in this process, without a cluster."""

from itertools import chain

import pyarrow as pa
import pytest

from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.index.redis_source import RedisCorpusSource
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
def test_the_ranges_make_up_the_corpus_in_order(redis_url, task, corpus, parallelism):
    source = RedisCorpusSource(redis_url, task, batch_rows=4)
    found = tables(source, parallelism)
    assert len(found) == min(parallelism, 23)
    assert all(0 < table.num_rows <= 4 for part in found for table in part)
    assert whole(found) == [
        {"ordinal": n, "key": row.key, "input": row.input, "output": row.output}
        for n, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize("parallelism", [1, 3, 23])
@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_every_row_knows_the_words_before_it_however_the_corpus_is_cut(
    redis_url, task, corpus, parallelism, words
):
    source = RedisCorpusSource(redis_url, task, batch_rows=2, previous_words=words)
    found = whole(tables(source, parallelism))
    assert len(found) == 23
    for side in ("input", "output"):
        said = [getattr(row, side).split() for row in ROWS]  # only every fifth input has words
        before = [[*chain(*said[:n])][-words:] for n in range(23)]
        assert [row[f"previous_{side}"] for row in found] == [" ".join(each) for each in before]


def test_the_length_is_fixed_when_the_source_is_made(redis_url, task, corpus):
    source = RedisCorpusSource(redis_url, task)
    corpus.append([CorpusRow("later", "x", "y")])
    assert [row["key"] for row in whole(tables(source, 2))] == [row.key for row in ROWS]
    assert RedisCorpusSource(redis_url, task).rows == 24


def test_a_row_limit_holds_for_each_task(redis_url, task, corpus):
    found = tables(RedisCorpusSource(redis_url, task, batch_rows=2), 2, per_task_row_limit=3)
    assert [sum(table.num_rows for table in part) for part in found] == [3, 3]


def test_tasks_tell_ray_their_rows_and_about_their_bytes(redis_url, task, corpus):
    source = RedisCorpusSource(redis_url, task)
    told = [read.metadata for read in source.get_read_tasks(3)]
    assert sum(metadata.num_rows for metadata in told) == 23
    assert sum(metadata.size_bytes for metadata in told) == pytest.approx(
        source.estimate_inmemory_data_size(), abs=3
    )
    assert source.estimate_inmemory_data_size() > 23 * 8


def test_a_corpus_without_rows_is_an_error_that_names_the_task(redis_url, task):
    with pytest.raises(EmptyCorpusError):
        RedisCorpusSource(redis_url, task)


def test_rows_that_vanish_while_they_are_read_are_an_error(redis_url, task, corpus, client):
    source = RedisCorpusSource(redis_url, task)
    client.delete(*client.keys(f"*{task}*"))
    with pytest.raises(EmptyCorpusError):
        tables(source, 2)
