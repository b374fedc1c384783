"""How far a guest is trusted is learnt from what the target says."""

import math

import numpy as np
import pytest
from draft_cases import begun, ids, make_index, make_proposer
from draft_checks import tree
from guest_cases import Guests, both, ngrams, said_by, told, trust, with_guest

from tasc_draft import DraftSettings
from tasc_draft.mixture.guests import FIRST_TRUST, MOST_TRUST, RATE


@pytest.mark.parametrize("mixture", ["mixed", "tasc"])
def test_a_guest_that_is_right_is_trusted_and_one_that_is_wrong_is_not(mixture: str) -> None:
    """The corpus says 1, prompts say nothing, and the guest says 7 and is as sure each time."""
    chance = {}
    for said in (7, 1):
        proposer = ngrams(mixture)
        for _ in range(40):
            begun(proposer, 0, [], [])
            chance[said] = math.exp(tree(with_guest(proposer, {(7,): 0.5}))[(7,)].logp)
            proposer.observe(0, ids([said]))
            proposer.finish(0)
    assert chance[7] > chance[1] + 0.1


def test_what_is_learnt_is_the_gradient_of_the_likelihood() -> None:
    proposer, guest = ngrams("tasc"), {(1,): 0.2, (7,): 0.7}
    begun(proposer, 0, [], [])
    with_guest(proposer, guest)
    proposer.observe(0, ids([7]))
    before = trust(proposer)
    proposer.propose(ids([0]), ids([0]))  # takes in what the target said
    moved = np.flatnonzero(trust(proposer) != before)
    own = {1: 0.5, 4: 0.5}

    def likelihood(a: float, b: float) -> float:
        return math.log(both(own, said_by(guest, ()), (a, b))[0][7])

    step = 1e-5
    by = [(likelihood(FIRST_TRUST + step * (side == 0), FIRST_TRUST + step * (side == 1))
           - likelihood(FIRST_TRUST, FIRST_TRUST)) / step for side in (0, 1)]  # fmt: skip
    wanted = [FIRST_TRUST + RATE * g / math.sqrt(1 + g * g) for g in by]
    assert trust(proposer)[moved].tolist() == pytest.approx(wanted, rel=1e-3)
    assert len(moved) == 2


@pytest.mark.parametrize(
    ("guest", "said", "bounds"),
    [({(7,): 0.6}, 7, (0.0, MOST_TRUST)), ({(7,): 0.5, (1,): 0.4}, 4, (None, 0.0))],
)
def test_trust_ends_at_its_bounds(
    guest: Guests, said: int, bounds: tuple[float | None, float]
) -> None:
    proposer = ngrams("tasc")
    for _ in range(4000):
        told(proposer, guest, said)
    for found, bound in zip(trust(proposer), bounds, strict=False):
        assert bound in (None, found)
    proposer.check_integrity()


def test_each_depth_and_sureness_has_an_exponent_of_its_own() -> None:
    proposer, guest = ngrams("tasc"), {(1,): 0.5, (1, 2): 0.3}
    told(proposer, guest, 9)  # SEP is followed by 1 or 4
    first = np.flatnonzero(trust(proposer) != FIRST_TRUST)
    before = trust(proposer)
    told(proposer, guest, 1, 9)  # 1 by 2, surely
    both_levels = np.flatnonzero(trust(proposer) != before)
    assert len(first) == 2
    assert set(first.tolist()) < set(both_levels.tolist())
    assert len(both_levels) == 4


def test_nothing_of_a_guest_is_learnt_at_rate_zero() -> None:
    setting = DraftSettings(min_prob=0.0, learning_rate=0.0)
    proposer = make_proposer(make_index([[1, 2, 3]] * 9), setting)
    told(proposer, {(7,): 0.5}, 7)
    assert (trust(proposer) == FIRST_TRUST).all()


def test_another_index_leaves_trust_as_it_is() -> None:
    proposer = ngrams()
    told(proposer, {(7,): 0.5}, 7)
    before = trust(proposer)
    proposer.set_index(make_index([[3, 2, 1]] * 4))
    assert (trust(proposer) == before).all()
    assert (before != FIRST_TRUST).any()
