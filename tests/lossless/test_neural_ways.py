"""Tests that neural drafts change no answer, for all kinds of requests and orders of rows."""

from itertools import count
from typing import Any

import pytest
from lossless_cases import (
    CAPACITY,
    Answered,
    Case,
    answer,
    answered_alone,
    assert_some_accepted_and_some_rejected,
    by,
    make_engine,
    neural,
    reference,
)
from request_grid import GUIDES

from lora_folders import make_adapter, merged_says
from support import failing_where, replace
from tasc_engine import EngineConfig, ModelSource, Request, Target
from tasc_engine.drafting.neural.proposer import NeuralProposer


@pytest.mark.parametrize(
    ("kind", "policy"), [("noisy", "recent"), ("eagle", "full"), ("eagle", "recent over ranked")]
)
def test_copied_prefixes_change_no_neural_answer(case, alike, kind, policy) -> None:
    """If a prefix is copied, its hidden states of the target are not available."""
    requests, answers = alike[0][:8], alike[1][:8]
    proposer = neural(case, kind, policy, rows=2)
    found = answer(case, rows=2, prefill_chunk=5, requests=requests, wrap=by(proposer))
    assert found.totals.shared_tokens > 90
    assert_some_accepted_and_some_rejected(found, 3)
    assert all(any(r.acceptance.drafted) for r in found.results.values())
    assert found.tokens() == answers


def drafted_as_plain(
    case: Case, asked: list[Request], proposer: NeuralProposer, **how: Any
) -> Answered:
    """Returns the answers with drafts, after checking that they equal those without."""
    found = answer(case, requests=asked, wrap=by(proposer), **how)
    plain = answer(case, requests=[replace(r, draft=False) for r in asked])
    assert found.tokens() == plain.tokens()
    return found


@pytest.mark.parametrize("kind", ["noisy", "eagle"])
def test_neural_drafts_change_no_guided_answer(case: Case, kind: str) -> None:
    """Guides also force tokens outside drafts. The proposer must read these before it drafts."""
    asked = [
        Request(str(i), p, 40, guide=GUIDES[i % 4] if i % 4 else None)
        for i, p in enumerate(case.prompts)
    ]
    found = drafted_as_plain(case, asked, neural(case, kind, "recent"), prefill_chunk=5)
    assert found.totals.forced_tokens > 0
    assert found.totals.accepted.sum() > 0


def test_swapping_proposers_during_answers_changes_no_answer(case: Case) -> None:
    config = EngineConfig(rows=3, max_model_len=CAPACITY, prefill_chunk=5)
    turns = [("eagle", "recent"), ("noisy", "full"), ("eagle", "full"), ("same", "recent")]
    engine, totals = make_engine(case, config, wrap=by(neural(case, "eagle", rows=3)))
    waiting, results, steps = case.requests(), {}, 0
    while waiting or engine.running:
        while waiting and not engine.waiting:
            engine.submit(waiting.pop())
        results |= {d.id: list(d.result.tokens) for d in engine.step() if d.result}
        steps += 1
        if steps % 6 == 0:
            engine.draft_by(neural(case, *turns[steps // 6 % 4], rows=3))
    assert steps > 24
    assert 20 < totals.accepted.sum() < totals.drafted.sum() - 20
    assert [results[str(i)] for i in range(len(results))] == case.answers


def test_drafts_do_not_change_answers_that_fill_their_rows(case: Case) -> None:
    """Drafting includes a row with room for one token beside rows with room for many."""
    model, prompts = reference(case.folder), [case.prompts[i] for i in (7, 5, 11, 0)]
    asked = [Request(str(i), p, CAPACITY - len(p), ignore_eos=True) for i, p in enumerate(prompts)]
    found = drafted_as_plain(case, asked, neural(case, "noisy"))
    assert_some_accepted_and_some_rejected(found)
    expected = answered_alone(model, prompts[0], 20)
    assert found.tokens()[0][: len(expected)] == expected


def test_rows_of_several_adapters_equal_merged_models(case: Case, alike: Any, tmp_path) -> None:
    """Prompts share prefixes with those of other adapters, and rows are used again.

    The target's last layer computes every token, since the drafter reads hidden states.
    """
    folders = {name: make_adapter(case.folder, tmp_path / name, i) for i, name in enumerate("ab")}
    config = EngineConfig(rows=4, max_model_len=CAPACITY, prefill_chunk=16)
    source = ModelSource(case.folder, dtype="float64", adapters=tuple(folders.items()))
    proposer = neural(case, "eagle", "recent over ranked")
    target = Target.load(source, config)
    engine, totals = make_engine(case, config, target=target, wrap=by(proposer))
    asked = [
        replace(request, adapter=adapter, max_tokens=16, id=f"{request.id} {adapter}")
        for request in alike[0]
        for adapter in (None, "a", "b")
    ]
    found = {r.id: r.tokens for r in engine.generate(asked)}
    answers = set()
    for request in asked:
        merged = folders[request.adapter] if request.adapter else None
        answers.add((request.prompt, found[request.id]))
        assert found[request.id] == merged_says(case.folder, merged, request.prompt, 16)
    assert len(answers) == len({(r.prompt, r.adapter) for r in asked}), "adapters change answers"
    assert 0 < totals.accepted.sum() < totals.drafted.sum()
    assert totals.shared_tokens > 0


@pytest.mark.parametrize(("kind", "policy"), [("noisy", "recent"), ("eagle", "full")])
def test_answers_are_unchanged_if_hidden_states_exceed_memory(case, kind, policy, monkeypatch):
    config = EngineConfig(rows=3, max_model_len=CAPACITY, prefill_chunk=5)
    target = Target.load(ModelSource(case.folder, dtype="float64"), config)
    assert target.decoder is not None
    steps, scarce = count(), [False]

    def is_full(n: int, hidden: Any, logits_indices: Any, cache: Any) -> bool:
        """From every fourth step on, until a step keeps no hidden states."""
        scarce[0] = logits_indices is None and (scarce[0] or next(steps) % 4 == 3)
        return scarce[0]

    failing_where(monkeypatch, target.decoder, "states", MemoryError(), is_full)
    proposer = neural(case, kind, policy, rows=3)
    engine, totals = make_engine(case, config, target=target, wrap=by(proposer))
    found = {r.id: list(r.tokens) for r in engine.generate(case.requests())}
    assert next(steps) > 20
    assert 0 < totals.accepted.sum() < totals.drafted.sum()
    assert [found[str(i)] for i in range(len(found))] == case.answers
