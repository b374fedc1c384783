"""Drafts worked out by hand. Each case names the answer that a likely mistake would give."""

import math
from typing import NamedTuple

import pytest
from draft_reference import EOS, ids, make_index, make_proposer, propose

from tasc_draft import DraftSettings


class Case(NamedTuple):
    documents: list[list[int]]
    prompt: list[int]
    answer: list[int]
    expected: list[int]
    wrong: list[int]
    weight: float = 0.75
    min_prob: float = 0.0
    limit: int = 3
    n_max: int = 6


CASES = {
    "the longest match decides; [1, 2] is what the more frequent shorter one says": Case(
        [[3, 1, 4], [1, 2], [1, 2]], [], [3, 1], [4, EOS], [2, EOS]
    ),
    "a context is n_max - 1 tokens; [4, 0] is what a longer one says": Case(
        [[3, 1, 4], [1, 2], [1, 2]], [], [3, 1], [2, EOS], [4, EOS], n_max=2
    ),
    "the answer begins behind the mark; [2, 0] is what the bare frequencies say": Case(
        [[1, 2, 2, 2]], [], [], [1, 2, 2], [2, 2, 2]
    ),
    "the prompt is not behind the mark; [4, 0] takes it for the answer's beginning": Case(
        [[3, 4], [1, 2]], [3], [], [1, 2, EOS], [4, EOS]
    ),
    "a match goes on through the draft; [1, 3, 0] looks at the observed answer only": Case(
        [[1, 2, 1, 3]], [], [], [1, 2, 1], [1, 2, 2]
    ),
    "a tie takes the lesser token; [4, 0] is the one seen last": Case(
        [[1, 2], [1, 4]], [], [1], [2, EOS], [4, EOS]
    ),
    "the prompt adds to the corpus: .375 + .25 beats .375; [2, ...] is the corpus alone": Case(
        [[1, 2], [1, 4]], [1, 4, 3], [1], [4, EOS], [2, EOS]
    ),
    "the corpus outweighs the prompt; [3, ...] is the prompt alone": Case(
        [[1, 2]], [1, 3, 4], [1], [2, EOS], [3, 4, 1]
    ),
    "a small lambda lets the prompt win; [2, 0] is the corpus alone": Case(
        [[1, 2]], [1, 3, 4], [1], [3, 4, 1], [2, EOS], weight=0.25
    ),
    "lambda 0 turns the corpus off; [2, 0] is the corpus": Case(
        [[1, 2]], [1, 3, 4], [1], [3, 4, 1], [2, EOS], weight=0.0
    ),
    "lambda 0 does so where the prompt does not match either; [2, 0] is the corpus": Case(
        [[1, 2], [3, 3, 3]], [], [1], [3, 3, 3], [2, EOS], weight=0.0
    ),
    "lambda 1 does so where the corpus does not match either; [1, 4, 1] is the prompt": Case(
        [[2, 2]], [4, 1], [4], [2, EOS], [1, 4, 1], weight=1.0
    ),
    "lambda 1 turns the prompt off; [1, ...] is the prompt": Case(
        [[3, 2], [3, 4]], [3, 1, 2], [3], [2, EOS], [1, 2, 3], weight=1.0
    ),
    "the prompt alone where the corpus does not match, at its full weight": Case(
        [[1, 2]], [3, 4], [3], [4, 3, 4], [2, EOS], min_prob=0.9
    ),
    "the most frequent token where neither matches; [] gives up": Case(
        [[1, 2, 2]], [], [4], [2, EOS], []
    ),
    "the answer is context for the prompt's source too; [] looks at the prompt only": Case(
        [], [3], [1, 2, 1], [2, 1, 2], []
    ),
    "the last token itself is no occurrence; [0] reads behind the end": Case(
        [], [1, 2, 3], [], [], [EOS]
    ),
    "an end of sequence ends the draft; [1, 0, 1] goes on": Case(
        [[1], [1]], [EOS, 1], [], [1, EOS], [1, EOS, 1]
    ),
    "min_prob cuts by the path, .5 * .5; [1, 1] cuts by the step": Case(
        [[1, 1], [1, 2], [3]], [], [], [1], [1, 1], min_prob=0.5
    ),
    "a path exactly at min_prob stays; [] cuts it": Case(
        [[1], [3]], [], [], [1, EOS], [], min_prob=0.5
    ),
    "num_speculative_tokens 0 drafts nothing": Case([[1, 2]], [1], [1], [], [2], limit=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_drafts_are_those_worked_out_by_hand(case: Case) -> None:
    setting = DraftSettings(
        n_max=case.n_max,
        corpus_weight=case.weight,
        num_speculative_tokens=case.limit,
        min_prob=case.min_prob,
    )
    proposer = make_proposer(make_index(case.documents), setting)
    proposer.start(0, ids(case.prompt))
    proposer.observe(0, ids(case.answer))
    found = [token for token, _, _ in propose(proposer, 0)]
    assert found != case.wrong
    assert found == case.expected


def test_log_probabilities_and_sources_are_those_worked_out_by_hand() -> None:
    """Behind 1 the corpus says 2 or 4, the prompt 4; behind 4 the corpus the end, the prompt 3."""
    proposer = make_proposer(make_index([[1, 2], [1, 4]]), DraftSettings(corpus_weight=0.4))
    proposer.start(0, ids([1, 4, 3]))
    proposer.observe(0, ids([1]))
    (first, p, source), (second, q, origin) = propose(proposer, 0, budget=2)
    assert (first, source, second, origin) == (4, "prompt", 3, "prompt")
    assert p == pytest.approx(math.log(0.4 / 2 + 0.6))
    assert q == pytest.approx(math.log(0.8 * 0.6))


def test_the_budget_is_kept_row_by_row_and_zero_is_an_empty_draft() -> None:
    proposer = make_proposer(make_index([[1, 2, 3, 4]]), DraftSettings(num_speculative_tokens=3))
    for row in range(3):
        proposer.start(row, ids([2]))
    drafts = proposer.propose(ids([2, 0, 1]), ids([2, 0, 9]))
    assert drafts.offsets.tolist() == [0, 2, 2, 5]
    assert drafts.tokens.tolist() == [1, 2, 1, 2, 3]
    assert proposer.max_depth == 3


def test_no_rows_are_an_empty_proposal() -> None:
    drafts = make_proposer(make_index([[1]]), DraftSettings()).propose(ids([]), ids([]))
    assert (drafts.offsets.tolist(), drafts.tokens.tolist()) == ([0], [])


def test_any_of_several_end_ids_ends_a_draft() -> None:
    proposer = make_proposer(make_index([[1, 3, 2]]), DraftSettings(), eos_ids=(EOS, 3))
    proposer.start(0, ids([4]))
    assert [token for token, _, _ in propose(proposer, 0)] == [1, 3]
