"""N-gram counts and count tables against a plain reference, however a text is cut."""

from collections import Counter
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statistics_reference import word_ngrams

from tasc_jobs.statistics.corpus_counts import count_rows, lengths_in, ngrams_in, partition_of
from tasc_jobs.statistics.ngrams import NgramTotal, Units, joined
from tasc_text.template import last_words

TEXTS = st.lists(st.text("abä \t\n\u00a0", max_size=8), max_size=12)


def total_of(texts, n, before=""):
    total = NgramTotal()
    for text in texts:
        total.add_row(text.split(), n, before)
        before = last_words(f"{before} {text}", n - 1)
    return total


@given(TEXTS, st.integers(1, 5))
def test_rows_count_as_one_running_text(texts, n):
    total, ngrams = total_of(texts, n), Counter(" ".join(each) for each in word_ngrams(texts, n))
    assert total.counts().ngrams == ngrams
    found = total.histogram()
    assert found.frequencies == Counter(ngrams.values())
    assert found.lengths == total.counts().lengths == Counter(len(text.split()) for text in texts)
    assert (found.rows, found.symbols) == (len(texts), len(" ".join(texts).split()))


@given(TEXTS, st.integers(1, 4), st.data())
def test_the_parts_of_any_partition_sum_up_to_the_whole(texts, n, data):
    inner = data.draw(st.lists(st.integers(0, len(texts)), max_size=5))
    borders = [0, *sorted(inner), len(texts)]
    parts = [
        total_of(texts[start:stop], n, last_words(" ".join(texts[:start]), n - 1)).counts()
        for start, stop in pairwise(borders)
    ]
    whole = NgramTotal()
    for part in data.draw(st.permutations(parts)):
        for ngram, count in part.ngrams.items():
            whole.add_ngram(ngram, count)
        for length, rows in part.lengths.items():
            whole.add_length(length, rows)
    assert whole.counts() == total_of(texts, n).counts()


def test_a_row_that_does_not_know_the_words_before_it_loses_ngrams():
    whole, deaf = NgramTotal(), NgramTotal()
    for total, before in ((whole, "a b"), (deaf, "")):
        total.add_row(["c", "d", "e"], 3, before)
    assert whole.counts().ngrams == {**deaf.counts().ngrams, "a b c": 1, "b c d": 1}


def test_counts_do_not_change_with_later_additions():
    total = NgramTotal()
    total.add_row(["a"], 1)
    counts, histogram = total.counts(), total.histogram()
    total.add_row(["a"], 1)
    assert (counts.ngrams, counts.lengths) == ({"a": 1}, {1: 1})
    assert (histogram.frequencies, histogram.lengths) == ({1: 1}, {1: 1})


def test_histograms_of_different_ngrams_add_up():
    left, right, both = NgramTotal(), NgramTotal(), NgramTotal()
    for total, row in ((left, "a a b"), (right, "c d d d")):
        total.add_row(row.split(), 1)
        both.add_row(row.split(), 1)
    assert joined(left.histogram(), right.histogram()) == both.histogram()
    assert both.histogram().frequencies == {2: 1, 1: 2, 3: 1}


@given(st.text("ab \n\u00a0", max_size=8), st.integers(0, 4))
def test_last_words_are_the_last_of_the_split(text, most):
    words = text.split()
    assert last_words(text, most) == " ".join(words[max(len(words) - most, 0) :])


@pytest.mark.parametrize("texts", [[], ["", " \n"], ["one"]])
def test_without_enough_words_there_is_no_ngram(texts):
    assert total_of(texts, 2).counts().ngrams == {}


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
