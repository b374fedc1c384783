"""Partitions of n-grams: the same in every process, disjoint, and together complete."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tasc_jobs.statistics.count_tables import count_rows, lengths_in, ngrams_in, partition_of
from tasc_jobs.statistics.units import Units

WORDS = st.lists(st.text("abcdä", min_size=1, max_size=3), max_size=20).map(" ".join)


def counted(pairs, partitions):
    inputs, outputs = zip(*pairs, strict=True)
    return count_rows(Units(1), partitions, pa.table({"input": inputs, "output": outputs}))


def test_an_ngram_has_the_same_partition_for_good():
    # Two processes, or two releases on one cluster, must agree; figures of CRC-32.
    assert [partition_of("ein Wort", n) for n in (1, 7, 1000)] == [0, 2, 865]
    assert [partition_of("ä 日本", n) for n in (1, 7, 1000)] == [0, 2, 702]


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=5), st.integers(1, 9))
def test_each_ngram_is_in_one_partition_and_each_length_in_none(pairs, partitions):
    table = counted(pairs, partitions)
    parts = [ngrams_in(table, partition) for partition in range(partitions)]
    ngrams = [set(part["ngram"].to_pylist()) for part in parts]
    assert len(set().union(*ngrams)) == sum(map(len, ngrams))
    rows = [row for part in (*parts, lengths_in(table)) for row in part.to_pylist()]
    assert sorted(map(str, rows)) == sorted(map(str, table.to_pylist()))


def test_partitions_are_of_nearly_equal_size():
    table = counted([(" ".join(map(str, range(10_000))), "")], 8)
    sizes = [ngrams_in(table, partition).num_rows for partition in range(8)]
    assert sum(sizes) == 10_000
    assert max(sizes) < 1.1 * min(sizes)
