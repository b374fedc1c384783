"""Tests that answers equal the target's for all neural drafters and vocabularies."""

from typing import Any

import pytest
from lossless_cases import Case, answer, assert_some_accepted_and_some_rejected, by, neural

from neural_drafters import INDEXED, KINDS, POLICIES, Always
from paired import paired
from support import replace, ruled
from tasc_draft import SOURCES
from tasc_engine import Sampling
from tasc_engine.drafting.neural.hybrid import HybridProposer
from tasc_engine.drafting.neural.tree import NeuralSettings

OTHER_ROWS = [("recent", "noisy", 1), ("recent", "eagle", 2), ("recent", "noisy", 8)]


@pytest.mark.parametrize(
    ("policy", "kind", "rows"),
    [*paired(POLICIES, by=KINDS, and_by=[4]), (INDEXED, "noisy", 4), *OTHER_ROWS],
)
def test_every_drafter_from_every_vocabulary_answers_like_generate(case, kind, policy, rows):
    found = answer(case, rows=rows, wrap=by(neural(case, kind, policy, rows=rows)))
    assert_some_accepted_and_some_rejected(found, 0 if kind == "other" else 20)
    assert found.tokens() == case.answers


@pytest.mark.parametrize(
    ("kind", "policy"), paired(["noisy", "eagle"], by=["recent over ranked", "full"])
)
def test_another_architecture_answers_like_generate(case_of: Any, kind: str, policy: str) -> None:
    llama = case_of("llama")
    found = answer(llama, wrap=by(neural(llama, kind, policy)))
    assert_some_accepted_and_some_rejected(found)
    assert found.tokens() == llama.answers


@pytest.mark.parametrize(
    ("kind", "policy", "sampled"),
    [
        ("noisy", "full", False),
        ("noisy", "full", True),
        ("eagle", "recent over ranked", True),
        pytest.param(
            "eagle", "recent over ranked", False, marks=pytest.mark.slow("each alone is daily")
        ),
    ],
)
def test_n_grams_and_a_drafter_in_one_tree_answer_like_the_target(case, kind, policy, sampled):
    drafter = neural(case, kind, policy)
    asked = [
        replace(r, **ruled(Sampling(temperature=1.0, seed=7 + i))) if sampled else r
        for i, r in enumerate(case.requests())
    ]
    plain = answer(case, requests=[replace(r, draft=False) for r in asked])
    found = answer(
        replace(case, corpus=case.corpus[:3]),  # enough for some answers, not for all
        requests=asked,
        wrap=lambda ngram: HybridProposer(ngram, drafter, 1.0, Always()),
    )
    accepted = found.totals.accepted.sum(axis=1)
    by_drafter = accepted[SOURCES.index("neural")]
    assert min(by_drafter, accepted.sum() - by_drafter) > 5, accepted
    assert found.totals.drafted.sum() - accepted.sum() > 20
    assert found.tokens() == plain.tokens()
    assert sampled == (found.tokens() != case.answers)


def test_what_the_target_itself_drafts_is_accepted_to_the_last_token(case: Case) -> None:
    chain = NeuralSettings(depth=6, width=1, nodes=6)
    found = answer(case, wrap=by(neural(case, "same", settings=chain)))
    assert found.totals.accepted.sum() == found.totals.drafted.sum() > 100
    assert found.totals.block_efficiency > 4
    assert found.tokens() == case.answers
