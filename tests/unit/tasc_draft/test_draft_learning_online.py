"""The weights follow what the target says, each row by its own tree, and not at rate 0."""

import dataclasses
import math

import numpy as np
from draft_cases import EOS, begun, full_index, ids, make_index, make_proposer, propose, tagged_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_draft.index.weights import Weights

# The corpus says that 1 goes on with 2; prompts will say otherwise, and so will the target.
INDEX = dataclasses.replace(make_index([[1, 2]] * 20), weights=Weights.prior())


def learner(rate: float, index: DraftIndex = INDEX) -> NgramProposer:
    setting = DraftSettings(
        min_prob=0.0, recent_tokens=0, learning_rate=rate, num_speculative_tokens=8
    )
    return make_proposer(index, setting)


def answer(proposer: NgramProposer, prompt: list[int], said: list[int]) -> None:
    """One row, told its answer token by token."""
    proposer.start(0, ids(prompt))
    for token in said:
        propose(proposer, 0)
        proposer.observe(0, ids([token]))
    proposer.finish(0)


def chance(proposer: NgramProposer, prompt: list[int], path: tuple[int, ...]) -> float:
    """Of a path from the answer's begin; nothing is learnt from asking."""
    proposer.start(0, ids(prompt))
    nodes = propose(proposer, 0)
    proposer.finish(0)
    return math.exp(nodes[path].logp) if path in nodes else 0.0


def test_what_is_repeated_becomes_likelier_and_what_is_not_said_less_likely() -> None:
    proposer = learner(0.1)
    prompt = [1, 3, 4]
    copied, usual = (1, 3), (1, 2)
    before = chance(proposer, prompt, copied)
    for _ in range(10):
        was = chance(proposer, prompt, copied), chance(proposer, prompt, usual)
        answer(proposer, prompt, [1, 3, EOS])
        assert chance(proposer, prompt, copied) > was[0]
        assert chance(proposer, prompt, usual) < was[1]
    assert chance(proposer, prompt, copied) > before + 0.1
    # It is the kind of evidence that was learnt, not the token.
    assert chance(proposer, [1, 5, 4], (1, 5)) > chance(learner(0.1), [1, 5, 4], (1, 5)) + 0.1


def test_nothing_is_learnt_at_rate_zero() -> None:
    proposer = learner(0.0, full_index())
    before = proposer.weights.values
    for prompt, output in zip(*tagged_rows(3, 10), strict=True):
        answer(proposer, prompt, [*output, EOS])
    np.testing.assert_array_equal(proposer.weights.values, before)
    assert (proposer.moved == 0).all()


def test_a_new_proposer_knows_what_its_index_knows() -> None:
    """Warming up teaches it nothing, and it leaves no answer behind."""
    proposer = make_proposer(INDEX, DraftSettings(learning_rate=0.5, min_prob=0.0))
    np.testing.assert_array_equal(proposer.weights.values, Weights.prior().values)
    proposer.start(0, ids([]))
    assert {node.source for node in propose(proposer, 0).values()} == {"corpus"}


def test_learning_does_not_touch_the_index() -> None:
    proposer = learner(0.5)
    answer(proposer, [1, 3, 4], [1, 3, EOS])
    assert (proposer.moved > 0).any()
    np.testing.assert_array_equal(INDEX.weights.values, Weights.prior().values)


def test_a_teacher_learns_as_an_answer_does() -> None:
    taught, told = learner(0.1), learner(0.1)
    for _ in range(3):
        taught.teach(ids([1, 3, 4]), ids([1, 3, EOS]), 0.1)
        answer(told, [1, 3, 4], [1, 3, EOS])
    np.testing.assert_array_equal(taught.weights.values, told.weights.values)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=6))
def test_an_answer_told_at_once_teaches_where_the_tree_led(said: list[int]) -> None:
    """All tokens along the drafted path, and the first one that leaves it; nothing behind."""
    proposer, stepwise = learner(0.1), learner(0.1)
    proposer.start(0, ids([1, 3, 4]))
    nodes = propose(proposer, 0)
    depth = 0
    while depth < len(said) and tuple(said[:depth]) in ((), *nodes):
        depth += 1
    proposer.observe(0, ids(said))
    proposer.finish(0)
    moved = proposer.moved
    assert (moved > 0).any()
    stepwise.start(0, ids([1, 3, 4]))
    propose(stepwise, 0)
    stepwise.observe(0, ids(said[:depth]))
    stepwise.finish(0)
    np.testing.assert_array_equal(moved, stepwise.moved)


def test_every_branch_of_a_tree_teaches() -> None:
    """Whichever of a node's children the answer goes to, what it says behind it counts."""
    index = dataclasses.replace(make_index([[1, 2], [3, 4], [5, 6]]), weights=Weights.prior())
    for first in (1, 3, 5):
        moved = []
        for said in ([first], [first, first + 1]):
            proposer = learner(0.1, index)
            proposer.start(0, ids([]))
            assert {(1, 2), (3, 4), (5, 6)} <= propose(proposer, 0).keys()
            proposer.observe(0, ids(said))
            proposer.finish(0)
            moved.append(proposer.moved.sum())
        assert 0 < moved[0] < moved[1]


def test_a_row_is_not_taught_by_another_rows_tree() -> None:
    """Row 0 sits out a step in which row 1's tree takes its place."""
    proposer = learner(0.5)
    begun(proposer, 0, [1, 3, 4], [])
    begun(proposer, 1, [1, 2], [1])
    proposer.propose(ids([0, 1]), ids([8, 8]))
    proposer.propose(ids([1]), ids([8]))
    proposer.observe(0, ids([1, 3]))
    proposer.finish(0)
    assert (proposer.moved == 0).all()
    proposer.observe(1, ids([2]))
    proposer.finish(1)
    assert (proposer.moved > 0).any()


def test_what_was_learnt_goes_with_the_old_index() -> None:
    proposer = learner(0.5)
    proposer.start(0, ids([1, 3, 4]))
    propose(proposer, 0)
    proposer.observe(0, ids([1, 3]))
    proposer.set_index(full_index())
    propose(proposer, 0)
    np.testing.assert_array_equal(proposer.weights.values, Weights.initial().values)
    assert (proposer.moved == 0).all()
