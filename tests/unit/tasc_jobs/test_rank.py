"""Rank correlation and directions against values worked out by hand."""

import random

import pytest

from tasc_jobs.forecast_ft.rank import falls_at_rises, kendall_tau


def test_tau_is_that_of_a_textbook() -> None:
    # Six pairs in order, four against it: (6 - 4) / 10.
    assert kendall_tau([1, 2, 3, 4, 5], [3, 4, 1, 2, 5]) == pytest.approx(0.2)
    assert kendall_tau([1, 2, 3, 4], [9, 5, 3, 1]) == -1
    assert kendall_tau([1, 2, 3], [1, 4, 9]) == 1


def test_ties_are_taken_out_of_both_series() -> None:
    # Four pairs in order, none against it, one tie in either: 4 / sqrt(5 * 5).
    assert kendall_tau([1, 2, 2, 3], [1, 2, 3, 3]) == pytest.approx(0.8)
    # Two pairs in order, one tie in the first alone: 2 / sqrt(2 * 3).
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)


def test_tau_of_what_never_changes_is_unknown() -> None:
    assert kendall_tau([1, 1, 1], [1, 2, 3]) is None
    assert kendall_tau([1, 2, 3], [5, 5, 5]) is None
    assert kendall_tau([1], [2]) is None


@pytest.mark.parametrize("seed", range(5))
def test_tau_turns_its_sign_with_a_series_and_does_not_know_their_order(seed: int) -> None:
    chance = random.Random(seed)
    one, other = ([chance.randint(0, 5) for _ in range(9)] for _ in range(2))
    tau = kendall_tau(one, other)
    assert tau is not None
    assert kendall_tau(other, one) == pytest.approx(tau)
    assert kendall_tau(one, [-x for x in other]) == pytest.approx(-tau)


def test_only_rises_count_and_only_falls_are_right() -> None:
    entropy, ms = [1, 2, 3, 2.5, 4, 4], [9, 7, 8, 1, 1, 0]
    # Rises 1 -> 2 (falls), 2 -> 3 (rises), 2.5 -> 4 (stays).
    assert falls_at_rises(entropy, ms) == (3, 1)
    assert falls_at_rises([3, 2], [1, 2]) == (0, 0)
