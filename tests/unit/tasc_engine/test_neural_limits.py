"""What a neural proposer may be given and may draft, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from neural_rows import (
    CAPACITY,
    PROMPTS,
    ROWS,
    TREE,
    assert_same,
    begun,
    every,
    ids,
    make,
    propose,
    tree,
)

from neural_drafters import drafter_of, proposer_of
from support import refused
from tasc_engine import UnsupportedModel
from tasc_engine.drafting.neural.recent import RecentVocabulary
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.model.operations import TensorOperations
from tiny import make_folder


@every
def test_each_row_keeps_to_its_budget(folder: Path, kind: str) -> None:
    """The likeliest of a tree, however much more its neighbours may have."""
    proposer = make(folder, kind)
    for row, prompt in enumerate(PROMPTS):
        begun(proposer, row, prompt, [3])
    whole = [tree(propose(proposer, [row])) for row in range(ROWS)]
    for budget in ([0, 0, 0], [1, 0, 12], [0, 5, 2], [3, 63, 0]):
        drafts = proposer.propose(ids([0, 1, 2]), ids(budget))
        assert np.diff(drafts.offsets).tolist() == [min(b, TREE.nodes) for b in budget]
        for row in range(ROWS):
            assert_same(tree(drafts, row), dict([*whole[row].items()][: budget[row]]))


def test_what_is_not_worth_its_cost_is_not_drafted(folder: Path) -> None:
    proposer = make(folder)
    begun(proposer, 0, PROMPTS[0], [3])
    begun(proposer, 1, PROMPTS[1], [3])
    likely = propose(proposer, [0, 1])
    least = np.full(24, 0.2, np.float32)
    drafts = proposer.propose(ids([0, 1]), ids([12, 12]), least)
    assert 0 < len(drafts.tokens) == (np.exp(likely.logp) >= 0.2).sum() < len(likely.tokens)
    fewer = proposer.propose(ids([0, 1]), ids([12, 12]), least[:1])
    assert fewer.logp.tolist() == [likely.logp.max()]


@every
def test_a_row_can_be_filled_to_its_capacity_and_no_further(folder: Path, kind: str) -> None:
    proposer = make(folder, kind)
    begun(proposer, 1, PROMPTS[1], [3])
    neighbour = tree(propose(proposer, [1]))
    begun(proposer, 0, PROMPTS[2], [7] * (CAPACITY - 20))
    full = tree(propose(proposer, [0]))
    with refused(ValueError, "row 0", "64"):
        proposer.observe(0, ids([1]))
    together = propose(proposer, [0, 1])
    assert_same(tree(together, 0), full)
    assert_same(tree(together, 1), neighbour)


def test_a_nearly_full_row_reads_no_position_that_there_is_not(folder: Path) -> None:
    """Beside a row with room it is grown as deep as that one."""
    proposer = make(folder)
    decoder = proposer.backbone.decoder
    turns = torch.as_tensor(decoder.operations.turns).view(CAPACITY, 2, decoder.head_dim)
    decoder.operations = TensorOperations(
        turns, decoder.heads, decoder.kv_heads, torch.nn.functional.silu
    )  # of which an index minds its bounds
    begun(proposer, 0, PROMPTS[2], [7] * (CAPACITY - 22))
    begun(proposer, 1, PROMPTS[1], [3])
    drafts = proposer.propose(ids([0, 1]), ids([1, 12]))
    alone = proposer.propose(ids([0]), ids([1]))
    assert_same(tree(drafts), tree(alone))
    assert np.diff(drafts.offsets).tolist() == [1, 12]


def test_rows_that_do_not_fit_are_refused_and_stay_free(folder: Path) -> None:
    proposer = make(folder)
    size = proposer.vocab_size
    for alien in (-1, size):
        with refused(ValueError, str(alien), str(size)):
            proposer.start(0, ids([1, alien]))
    with refused(ValueError, "65", "64"):
        proposer.start(0, ids([1] * 65))
    assert len(propose(proposer, [0]).tokens) == 0
    proposer.start(0, ids([1] * 5))
    with refused(ValueError, "row 0"):
        proposer.start(0, ids([1]))
    with refused(ValueError, "-5"):
        proposer.observe(0, ids([1, -5]))
    proposer.finish(0)
    proposer.start(0, ids([1]))


@every
def test_rows_that_nobody_is_in_are_not_drafted_for(folder: Path, kind: str) -> None:
    proposer = make(folder, kind)
    begun(proposer, 0, PROMPTS[0], [3])
    for nobody in (1, 3, -1):
        drafts = propose(proposer, [nobody, 0, nobody])
        assert np.diff(drafts.offsets).tolist() == [0, 12, 0]
    begun(proposer, 1, [], [])
    assert np.diff(propose(proposer, [1, 0]).offsets).tolist() == [0, 12]
    proposer.finish(0)
    assert len(propose(proposer, [0, 1]).tokens) == 0


def test_a_drafter_that_looks_back_over_a_window_is_refused(tmp_path: Path) -> None:
    with refused(UnsupportedModel, "window"):
        make(make_folder(tmp_path, "mistral"))


def test_a_vocabulary_smaller_than_the_tree_is_drafted_from_as_it_is(folder: Path) -> None:
    drafter, head = drafter_of("same", folder, ROWS, CAPACITY)
    few = RecentVocabulary(head, ROWS, window=2, extension=False)
    proposer = proposer_of(drafter, few, TREE, rows=ROWS, capacity=CAPACITY, eos_ids=(0,))
    for row, prompt in enumerate(([5, 9], [7, 7])):  # nobody says what the target thinks of them
        proposer.start(row, ids(prompt))
        proposer.observe(row, ids([3]))
    assert {token for path in tree(propose(proposer, [0])) for token in path} == {5, 9}
    drafts = propose(proposer, [1, 0])
    assert [*tree(drafts)] == [(7,) * n for n in (1, 2, 3, 4)]
    assert {token for path in tree(drafts, 1) for token in path} == {5, 9}


@pytest.mark.parametrize(("depth", "width"), [(4, 21), (16, 4), (1, 32), (3, 8), (6, 10)])
def test_the_largest_trees_are_drafted(folder: Path, depth: int, width: int) -> None:
    proposer = make(folder, settings=NeuralSettings(depth, width, 63))
    begun(proposer, 0, PROMPTS[0], [3])
    assert len(propose(proposer, [0], 63).tokens) == min(63, width if depth == 1 else 63)
