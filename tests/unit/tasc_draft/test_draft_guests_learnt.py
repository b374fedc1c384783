"""How far a guest is trusted is learnt from what the target says."""

import math

import numpy as np
import pytest
from draft_cases import begun, ids, make_index, make_proposer
from draft_checks import tree
from guest_cases import (
    both,
    cell,
    drafts_of,
    ngrams,
    said_by,
    set_trust,
    told,
    trust,
    with_guest,
)

from tasc_draft import DraftSettings
from tasc_draft.mixture.candidates import NODE
from tasc_draft.mixture.guests import (
    CELLS,
    MOST_ADDED,
    MOST_EXPONENT,
    RATE,
    TRUST,
    first_trust,
    guest_of,
    mix,
)


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


@pytest.mark.parametrize("said", [1, 4, 7, 9])
def test_what_is_learnt_is_the_gradient_of_the_likelihood(said: int) -> None:
    """Tokens that both named, each alone, and nobody."""
    proposer, guest, own = ngrams("tasc"), {(1,): 0.2, (7,): 0.7}, {1: 0.5, 4: 0.5}
    before = np.zeros((CELLS, len(TRUST)), np.float32)
    before[0], before[cell(own, 0)] = (0.6, 0.4, -0.5, 0.3, 0.2), (0.1, 0.2, 0.3, -0.4, 0.5)
    set_trust(proposer, before)
    told(proposer, guest, said)
    moved = trust(proposer)

    def likelihood(numbers: np.ndarray) -> float:
        chances, none = both(own, said_by(guest, ()), numbers.tolist())
        return math.log(chances.get(said, none))

    at, step = (before[0] + before[cell(own, 0)]).astype(float), 1e-5
    by = np.array([likelihood(at + step * k) - likelihood(at) for k in np.eye(len(at))]) / step
    for each in (0, cell(own, 0)):
        wanted = before[each] + RATE * by / np.sqrt(1 + by * by)
        assert moved[each].tolist() == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("number", "bound"),
    [(0, -MOST_EXPONENT), (1, MOST_EXPONENT), (2, MOST_ADDED), (3, -MOST_ADDED), (4, -MOST_ADDED)],
)
def test_trust_ends_at_its_bounds(number: int, bound: float) -> None:
    """The corpus says 1 or 4, the guest alone names what comes."""
    proposer, nearly = ngrams("tasc"), np.zeros((CELLS, len(TRUST)), np.float32)
    nearly[0, number] = bound * (1 - 1e-6)
    if number == 0:  # together they are just heard
        nearly[cell({1: 0.5, 4: 0.5}, 0), 0] = MOST_EXPONENT
    set_trust(proposer, nearly)
    told(proposer, {(7,): 0.6}, 7)
    assert trust(proposer)[0, number] == bound
    proposer.check_integrity()
    set_trust(proposer, 1.001 * trust(proposer))
    with pytest.raises(AssertionError, match="weights"):
        proposer.check_integrity()


def test_nodes_of_a_depth_and_a_sureness_have_numbers_of_their_own() -> None:
    proposer, guest = ngrams("tasc"), {(1,): 0.5, (1, 2): 0.3}
    told(proposer, guest, 9)  # SEP is followed by 1 or 4
    first = moved_cells(trust(proposer), first_trust())
    before = trust(proposer)
    told(proposer, guest, 1, 9)  # 1 by 2, surely
    assert first == {0, cell({1: 0.5, 4: 0.5}, 0)}
    assert moved_cells(trust(proposer), before) == first | {cell({2: 1.0}, 1)}


def moved_cells(trust: np.ndarray, before: np.ndarray) -> set[int]:
    return set(np.flatnonzero((trust != before).any(1)).tolist())


@pytest.mark.parametrize(("said", "moves"), [(1, False), (7, True)])
def test_an_exponent_that_is_nothing_gets_no_less_but_may_rise(said: int, moves: bool) -> None:
    """The guest names 7 alone."""
    proposer, before = ngrams("tasc"), np.zeros((CELLS, len(TRUST)), np.float32)
    own = cell({1: 0.5, 4: 0.5}, 0)
    before[0, :2], before[own, 1] = (0.5, -0.2), 0.1
    set_trust(proposer, before)
    told(proposer, {(7,): 0.9}, said)
    moved = trust(proposer) - before
    assert (moved[0, 1] > 0) == (moved[own, 1] > 0) == moves
    assert moves or not moved[:, 1].any()
    assert moved[0, 0] != 0.0  # the others' is learnt


def test_what_n_grams_found_without_a_chance_they_have_named() -> None:
    nodes = np.zeros(1, NODE)
    node = nodes[0]
    node["width"] = node["wide"] = 3
    node["candidates"][:3], node["chance"][:3] = (1, 2, 3), (0.8, 0.0, 0.0)
    node["guest"], guest = 0, guest_of(drafts_of([{(7,): 0.5, (2,): 0.25}]))
    mix(first_trust(), node, guest)
    hopeless = 1e-9  # less than what counts
    wanted, none = both({1: 0.8, 2: hopeless, 3: hopeless}, {7: 0.5, 2: 0.25}, TRUST)
    found = dict(zip(node["candidates"][:4].tolist(), node["mixed"][:4].tolist(), strict=True))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert node["none"] == pytest.approx(none, rel=1e-4)


def test_how_little_a_guest_leaves_out_is_learnt() -> None:
    """It names the token that comes next with little probability, but names it each time."""
    chance = {}
    for times in (1, 200):
        proposer = ngrams("tasc")
        for i in range(times):
            begun(proposer, 0, [], [])
            nodes = tree(with_guest(proposer, {(5 + i % 3,): 0.02, (8,): 0.01}))
            chance[times] = math.exp(nodes[(5 + i % 3,)].logp)
            proposer.observe(0, ids([5 + i % 3]))
            proposer.finish(0)
    assert chance[200] > 5 * chance[1]


def test_nothing_of_a_guest_is_learnt_at_rate_zero() -> None:
    setting = DraftSettings(min_prob=0.0, learning_rate=0.0)
    proposer = make_proposer(make_index([[1, 2, 3]] * 9), setting)
    told(proposer, {(7,): 0.5}, 7)
    assert (trust(proposer) == first_trust()).all()


def test_another_index_leaves_trust_as_it_is() -> None:
    proposer = ngrams()
    told(proposer, {(7,): 0.5}, 7)
    before = trust(proposer)
    proposer.set_index(make_index([[3, 2, 1]] * 4))
    assert (trust(proposer) == before).all()
    assert (before != first_trust()).any()
