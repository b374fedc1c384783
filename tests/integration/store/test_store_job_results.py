"""Entries of a batch job are written once and not again when they have been moved."""

import uuid

import pytest
import redis

from tasc_store import JobResults, StoreFull
from tasc_store.job_results import KEPT_S, MAX_BATCH

pytestmark = pytest.mark.redis


@pytest.fixture
def results(client: redis.Redis) -> JobResults:
    return JobResults(client, "t", uuid.uuid4().hex)


def test_the_first_entry_of_a_row_stays(results: JobResults) -> None:
    assert results.put([(0, "a"), (2, "c")]) == 2
    assert results.put([(0, "x"), (1, "b")]) == 1
    assert results.get([0, 1, 2, 3]) == [b"a", b"b", b"c", None]
    assert results.rows() == {0, 1, 2}
    assert len(results) == 3


def test_rows_that_were_moved_are_forgotten_and_take_no_entry_more(results: JobResults) -> None:
    results.put([(row, str(row)) for row in range(6)])
    results.moved(0, 4)
    assert results.rows() == {4, 5}
    assert results.put([(3, "late"), (4, "late"), (6, "6")]) == 1
    assert results.get([3, 4, 6]) == [None, b"4", b"6"]


@pytest.mark.parametrize("first", [0, 2, 5])
def test_a_job_whose_files_hold_fewer_rows_or_more_goes_on_at_theirs(
    results: JobResults, first: int
) -> None:
    results.moved(0, 4)
    results.resume_at(first)
    assert results.put([(row, str(row)) for row in range(7)]) == 7 - first
    assert results.rows() == set(range(first, 7))


def test_a_full_redis_lets_rows_be_moved_and_a_job_be_resumed(
    client: redis.Redis, results: JobResults
) -> None:
    results.put([(row, "x" * 1000) for row in range(2 * MAX_BATCH)])
    client.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        results.put([(2 * MAX_BATCH, "x")])
    results.moved(0, 2 * MAX_BATCH - 1)
    results.resume_at(5)
    assert results.rows() == {2 * MAX_BATCH - 1}
    client.config_set("maxmemory", 0)
    assert results.put([(4, "late"), (5, "5")]) == 1


def test_more_rows_than_one_script_takes(results: JobResults) -> None:
    count = 2 * MAX_BATCH + 1
    assert results.put([(row, "x") for row in range(count)]) == count
    assert results.get(range(count)) == [b"x"] * count
    results.moved(0, count - 1)
    assert results.rows() == {count - 1}


def test_what_nobody_comes_back_for_goes_by_itself(
    client: redis.Redis, results: JobResults
) -> None:
    results.put([(0, "a"), (1, "b")])
    results.moved(0, 1)
    left = [
        key for key in client.keys("tasc:{t}:job:*") if client.type(key) in (b"hash", b"string")
    ]
    assert len(left) >= 2
    assert all(0 < client.ttl(key) <= KEPT_S for key in left)
    results.clear()
    assert results.rows() == set()


def test_a_job_is_named_as_keys_may_be(client: redis.Redis) -> None:
    with pytest.raises(ValueError, match="will not do"):
        JobResults(client, "t", "a:b")
