"""Corpora and collected answers in a real Redis: bounded, in order, and nothing is lost."""

import threading

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import refused
from tasc_store import Appended, CollectedRow, CollectedRows, CorpusRow, CorpusStore, StoreFull
from tasc_store.corpus import MAX_COLLECTED

pytestmark = pytest.mark.redis


ROWS = [CorpusRow(f"f:{i}", f"input {i}", "same output") for i in range(10)]


def test_row_with_a_known_key_is_not_added_again(client: redis.Redis) -> None:
    corpus = CorpusStore(client, "t")
    twins = [CorpusRow("a", "in", "out"), CorpusRow("b", "in", "out"), CorpusRow("a", "x", "y")]
    assert corpus.append(twins) == Appended(added=2, known=1)
    assert corpus.append(twins) == Appended(added=0, known=3)
    assert corpus.read(0, 9) == twins[:2]
    assert CorpusStore(client, "u").append([]) == Appended(0, 0)
    assert len(CorpusStore(client, "u")) == 0, "tasks do not share rows"


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
def test_any_corpus_text_round_trips(client: redis.Redis, texts: list[tuple[str, str]]) -> None:
    client.flushall()
    corpus = CorpusStore(client, "t")
    rows = [CorpusRow(f"k{i}", *pair) for i, pair in enumerate(texts)]
    corpus.append(rows)
    assert corpus.read(0, len(rows)) == rows


WIDE = {"max_rows": 1000, "max_bytes": 1 << 20}


def row(n: int, size: int = 1) -> CollectedRow:
    return CollectedRow(f"ask {n}", "é" * size)


@pytest.fixture
def collected(client: redis.Redis) -> CollectedRows:
    return CollectedRows(client, "task")


def test_collected_rows_stay_in_order_until_they_are_removed(collected: CollectedRows) -> None:
    rows = [row(n) for n in range(5)]
    assert collected.add(rows[:3], **WIDE) == 0
    assert collected.add(rows[3:], **WIDE) == 0
    assert collected.read().rows == collected.read().rows == tuple(rows)
    first = collected.read(2)
    assert first.rows == tuple(rows[:2])
    assert collected.remove(first.end) == 2
    assert collected.remove(first.end) == 0, "a repeated removal takes nothing more"
    assert (collected.read().rows, len(collected)) == (tuple(rows[2:]), 3)


def test_removal_of_read_rows_keeps_rows_added_since_the_read(collected: CollectedRows) -> None:
    assert collected.add([row(n) for n in range(-1, 3)], max_rows=3, max_bytes=1 << 20) == 1
    seen = collected.read(2)
    collected.add([row(3), row(4)], max_rows=3, max_bytes=1 << 20)  # rows 0 and 1 are dropped
    assert collected.remove(seen.end) == 0
    assert collected.read().rows == tuple(row(n) for n in (2, 3, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 5), st.integers(60, 300))
def test_newest_collected_rows_are_kept(client, sizes, most, max_bytes) -> None:
    client.flushall()
    collected = CollectedRows(client, "task")
    rows = [CollectedRow(str(n), "x" * size) for n, size in enumerate(sizes)]
    gone = sum(collected.add([r], max_rows=most, max_bytes=max_bytes) for r in rows)
    kept = collected.read().rows
    assert kept == tuple(rows[gone:])
    state = client.hgetall("tasc:{task}:collected:state")
    held = client.lrange("tasc:{task}:collected:rows", 0, -1)
    assert int(state.get(b"bytes", 0)) == sum(map(len, held)) <= max_bytes
    assert len(kept) <= most


def test_many_collected_rows_are_removed_in_steps(collected: CollectedRows) -> None:
    for begin in (0, MAX_COLLECTED, 2 * MAX_COLLECTED):
        rows = [row(n) for n in range(begin, begin + MAX_COLLECTED)]
        collected.add(rows, max_rows=10_000, max_bytes=1 << 20)
    assert collected.remove(3 * MAX_COLLECTED - 1) == 3 * MAX_COLLECTED - 1
    assert collected.read().rows == (row(3 * MAX_COLLECTED - 1),)
    with refused(ValueError, "500"):
        collected.add([row(0)] * (MAX_COLLECTED + 1), **WIDE)


def test_full_server_loses_no_collected_row(collected: CollectedRows, client: redis.Redis) -> None:
    collected.add([row(0)], **WIDE)
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        collected.add([row(1)], max_rows=1, max_bytes=1 << 20)
    client.config_set("maxmemory", 0)
    assert collected.read().rows == (row(0),)


@pytest.mark.parametrize("bad", [("in", " \n"), ("in", ""), ("\ud800", "out"), ("in", "\ud800")])
def test_invalid_row_is_refused(bad: tuple[str, str]) -> None:
    with refused(ValueError, "collected row"):
        CollectedRow(*bad)
