"""Tests that answers equal the target's for all neural drafters and vocabularies."""

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
def test_answers_with_every_drafter_and_vocabulary_equal_transformers_answers(
    case, kind, policy, rows
):
    found = answer(case, rows=rows, wrap=by(neural(case, kind, policy, rows=rows)))
    assert_some_accepted_and_some_rejected(found, 0 if kind == "other" else 20)
    assert found.tokens() == case.answers


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
def test_hybrid_drafts_change_no_answer(case, kind, policy, sampled):
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


def test_drafts_by_the_target_model_are_all_accepted(case: Case) -> None:
    chain = NeuralSettings(depth=6, width=1, nodes=6)
    found = answer(case, wrap=by(neural(case, "same", settings=chain)))
    assert found.totals.accepted.sum() == found.totals.drafted.sum() > 100
    assert found.totals.block_efficiency > 4
    assert found.tokens() == case.answers
