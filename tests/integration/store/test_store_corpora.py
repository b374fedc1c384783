"""Corpora in a real Redis: each key once, order kept."""

import threading

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasc_store import Appended, CorpusRow, CorpusStore

pytestmark = pytest.mark.redis
ROWS = [CorpusRow(f"f:{i}", f"input {i}", "same output") for i in range(10)]


def test_ingesting_twice_does_not_double(client: redis.Redis) -> None:
    corpus = CorpusStore(client, "t")
    assert corpus.append(ROWS) == Appended(added=10, known=0)
    assert corpus.append(ROWS) == Appended(added=0, known=10)
    assert corpus.read(0, len(corpus)) == ROWS


def test_equal_rows_under_different_keys_are_kept(client: redis.Redis) -> None:
    corpus = CorpusStore(client, "t")
    twins = [CorpusRow("a", "in", "out"), CorpusRow("b", "in", "out"), CorpusRow("a", "x", "y")]
    assert corpus.append(twins) == Appended(added=2, known=1)
    assert corpus.read(0, 9) == twins[:2]


def test_ranges_partition_the_corpus_in_order(client: redis.Redis) -> None:
    corpus = CorpusStore(client, "t")
    corpus.append(ROWS[:7])
    corpus.append(ROWS[5:])
    parts = [corpus.read(start, start + 4) for start in range(0, len(corpus), 4)]
    assert [len(part) for part in parts] == [4, 4, 2]
    assert [row for part in parts for row in part] == ROWS
    assert corpus.read(3, 3) == []


def test_tasks_do_not_share_rows(client: redis.Redis) -> None:
    CorpusStore(client, "t").append(ROWS)
    assert CorpusStore(client, "u").append([]) == Appended(0, 0)
    assert len(CorpusStore(client, "u")) == 0


def test_concurrent_writers_of_the_same_rows_write_each_once(client: redis.Redis) -> None:
    corpus = CorpusStore(client, "t")

    def write() -> None:
        for row in ROWS:
            corpus.append([row])

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert corpus.read(0, 100) == ROWS


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_any_text_comes_back_as_it_was(client: redis.Redis, texts: list[tuple[str, str]]) -> None:
    client.flushall()
    corpus = CorpusStore(client, "t")
    rows = [CorpusRow(f"k{i}", *pair) for i, pair in enumerate(texts)]
    corpus.append(rows)
    assert corpus.read(0, len(rows)) == rows
