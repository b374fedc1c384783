"""Bigram counts against a plain reference, and sums that do not depend on how a text is cut."""

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_jobs.bigrams import BigramCounts, count_bigrams, last_word, merge, statistics

TEXTS = st.lists(st.text("abä \t\n\u00a0", max_size=8), max_size=12)
FREQUENCIES = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def reference(texts):
    words = " ".join(texts).split()
    return BigramCounts(Counter(pairwise(words)), len(words))


def counts_of(frequencies):
    pairs = {("w", str(n)): frequency for n, frequency in enumerate(frequencies)}
    return BigramCounts(pairs, sum(frequencies) + 1)


@given(TEXTS)
def test_rows_count_as_one_running_text(texts):
    assert count_bigrams(texts, None) == reference(texts)


@given(TEXTS, st.data())
def test_the_parts_of_any_partition_sum_up_to_the_whole(texts, data):
    inner = data.draw(st.lists(st.integers(0, len(texts)), max_size=5))
    borders = [0, *sorted(inner), len(texts)]
    parts = [
        count_bigrams(texts[start:stop], last_word(" ".join(texts[:start])))
        for start, stop in pairwise(borders)
    ]
    assert merge(data.draw(st.permutations(parts))) == reference(texts)


def test_a_part_that_does_not_know_the_word_before_it_loses_a_bigram():
    whole = count_bigrams(["a b", "c d"], None)
    deaf = merge([count_bigrams(["a b"], None), count_bigrams(["c d"], None)])
    assert dict(whole.pairs) == {**deaf.pairs, ("b", "c"): 1}


@given(FREQUENCIES)
def test_entropy_is_the_mean_of_minus_log2_p(frequencies):
    total = sum(frequencies)
    expected = -sum(n / total * math.log2(n / total) for n in frequencies)
    found = statistics(counts_of(frequencies), 3)
    assert found.bigram_entropy_bits == pytest.approx(expected, abs=1e-9)
    assert (found.rows, found.words, found.bigrams) == (3, total + 1, total)
    assert found.unique_bigrams == len(frequencies)


@given(FREQUENCIES)
def test_80_percent_is_reached_by_that_many_bigrams_and_not_by_one_fewer(frequencies):
    needed = statistics(counts_of(frequencies), 1).bigrams_for_80_percent
    frequent_first = sorted(frequencies, reverse=True)
    bar = Fraction(4, 5) * sum(frequencies)
    assert sum(frequent_first[:needed]) >= bar > sum(frequent_first[: needed - 1])


def test_exactly_80_percent_is_enough():
    assert statistics(counts_of([4, 1]), 1).bigrams_for_80_percent == 1


@pytest.mark.parametrize("texts", [[], ["", " \n"], ["one"]])
def test_without_bigrams_every_figure_is_zero(texts):
    found = statistics(count_bigrams(texts, None), len(texts))
    assert (found.bigrams, found.unique_bigrams, found.bigrams_for_80_percent) == (0, 0, 0)
    assert found.bigram_entropy_bits == 0.0


@given(st.text("ab \n", max_size=6))
def test_last_word_is_the_last_of_the_split(text):
    assert last_word(text) == next(reversed(text.split()), None)
