"""Entropies, coverage, curves and lengths against their definitions."""

import random
from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statistics_reference import figures, percentiles

from tasc_jobs.statistics.distribution import CURVE_POINTS, distribution
from tasc_jobs.statistics.ngrams import MOST_BINS, row_lengths

FREQUENCIES = st.lists(st.integers(1, 50), max_size=30)
LENGTHS = st.lists(st.integers(0, 400), min_size=1, max_size=60)


@given(FREQUENCIES, st.none() | st.integers(30, 100))
def test_figures_are_those_of_their_definitions(frequencies, vocabulary):
    ngrams = [n for n, frequency in enumerate(frequencies) for _ in range(frequency)]
    found = asdict(distribution(Counter(frequencies), 3, vocabulary))
    assert found.pop("n") == 3
    del found["curve"]
    assert found == pytest.approx(figures(ngrams, vocabulary), abs=1e-9)


@given(FREQUENCIES, st.randoms())
def test_the_order_of_frequencies_changes_no_bit(frequencies, shuffler):
    found = distribution(Counter(frequencies), 1)
    shuffler.shuffle(frequencies)
    assert distribution(Counter(frequencies), 1) == found


def test_even_ngrams_have_all_entropies_alike_and_all_are_typical():
    found = distribution({7: 32}, 2)
    assert found.shannon_bits == found.renyi2_bits == 5
    assert (found.normalised_entropy, found.typical_set_size) == (1, 32)
    assert distribution({7: 32}, 1, vocabulary=2**10).normalised_entropy == 0.5


@given(FREQUENCIES)
def test_renyi_is_at_most_shannon_and_that_at_most_the_logarithm(frequencies):
    found = distribution(Counter(frequencies), 1)
    assert 0 <= found.renyi2_bits <= found.shannon_bits + 1e-9
    assert 0 <= found.normalised_entropy <= 1
    assert found.typical_set_size <= found.unique_ngrams + 1e-9


@given(FREQUENCIES)
def test_80_percent_is_reached_by_that_many_ngrams_and_not_by_one_fewer(frequencies):
    needed = distribution(Counter(frequencies), 1).ngrams_for_80_percent
    frequent_first = sorted(frequencies, reverse=True)
    bar = Fraction(4, 5) * sum(frequencies)
    assert sum(frequent_first[:needed]) >= bar
    assert not needed or sum(frequent_first[: needed - 1]) < bar


def test_exactly_80_percent_is_enough():
    assert distribution({4: 1, 1: 1}, 2).ngrams_for_80_percent == 1


def test_without_ngrams_every_figure_is_zero():
    found = asdict(distribution({}, 2))
    assert found.pop("curve") == ()
    assert found == {**dict.fromkeys(found, 0), "n": 2}


@pytest.mark.parametrize("unique", [1, 2, 63, 64, 65, 5_000])
def test_a_curve_has_few_points_from_the_first_rank_to_the_last(unique):
    frequencies = random.Random(unique).choices(range(1, 1_000), k=unique)
    frequent_first = sorted(frequencies, reverse=True)
    curve = distribution(Counter(frequencies), 1).curve
    assert (curve[0].rank, curve[-1].rank, curve[-1].coverage) == (1, unique, 1.0)
    assert min(unique, CURVE_POINTS // 2) <= len(curve) <= CURVE_POINTS
    assert all(left.rank < right.rank for left, right in pairwise(curve))
    for point in curve:
        assert point.count == frequent_first[point.rank - 1]
        covered = sum(frequent_first[: point.rank])
        assert point.coverage == pytest.approx(covered / sum(frequencies))


@given(LENGTHS)
def test_percentiles_are_by_nearest_rank_and_the_mean_is_of_all_rows(lengths):
    found = row_lengths(Counter(lengths))
    assert found.percentiles == percentiles(lengths)
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))


@given(LENGTHS)
def test_each_row_is_in_one_of_few_equal_bins(lengths):
    bins = row_lengths(Counter(lengths)).histogram
    assert 1 <= len(bins) <= MOST_BINS
    assert (bins[0].first, bins[-1].last) == (min(lengths), max(lengths))
    assert all(left.last + 1 == right.first for left, right in pairwise(bins))
    widths = [each.last - each.first + 1 for each in bins]
    assert len({*widths[:-1]}) <= 1
    assert widths[-1] <= widths[0]
    assert [each.rows for each in bins] == [
        sum(each.first <= length <= each.last for length in lengths) for each in bins
    ]
