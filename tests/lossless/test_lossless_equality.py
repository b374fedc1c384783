"""Tests that drafts never change an answer, compared with transformers' ``generate``."""

import dataclasses
from typing import Any

import pytest
import torch
from lossless_cases import CAPACITY, PAPER, Case, answer, answered_alone, reference

from support import Known
from tasc_draft import DraftSettings
from tasc_draft.settings import MIXTURES
from tasc_engine import Request

NEAR_TIE = 1e-5


def accepted_and_rejected(totals) -> tuple[int, int]:
    accepted = int(totals.accepted.sum())
    return accepted, int(totals.drafted.sum()) - accepted


def test_every_architecture_answers_like_transformers(any_case: Case) -> None:
    found = answer(any_case)
    assert min(accepted_and_rejected(found.totals)) > 20
    assert found.tokens() == any_case.answers


WAYS: list[dict[str, Any]] = [
    *(
        {"settings": DraftSettings(min_prob=0.0, num_speculative_tokens=n), "branching": branching}
        for n in (1, 7, 16)
        for branching in (True, False)
    ),
    {"settings": dataclasses.replace(PAPER, n_max=2)},
    {"settings": DraftSettings(min_prob=0.0, learning_rate=1.0)},
    *({"rows": n} for n in (1, 2, 8)),
    *({"prefill_chunk": n} for n in (1, 7, 1000)),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_drafting_gives_the_same_answers(case: Case, way: dict[str, Any]) -> None:
    found = answer(case, **way)
    assert min(accepted_and_rejected(found.totals)) > 0
    assert found.tokens() == case.answers


@pytest.fixture(scope="module")
def begun(case: Case) -> tuple[list[Request], list[list[int]]]:
    """Returns requests with the start of the answer in the prompt, so drafts can come from it."""
    prompts = [(*p, *a) for p, a in zip(case.prompts, case.answers, strict=True)]
    requests = [Request(str(i), p, 24) for i, p in enumerate(prompts)]
    return requests, [answered_alone(reference(case.folder), p, 24) for p in prompts]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_gives_the_same_answers(case: Case, begun: Any, mixture: str) -> None:
    settings = DraftSettings(mixture=mixture, min_prob=0.0)
    found = answer(case, settings=settings, requests=begun[0])
    assert min(accepted_and_rejected(found.totals)) > 0
    assert found.tokens() == begun[1]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_copied_prefixes_change_no_answer(case: Case, alike: Any, kept: int) -> None:
    requests, answers = alike
    found = answer(case, requests=requests, rows=2, prefix_cache_bytes=kept)
    asked = sum(len(request.prompt) for request in requests)
    assert found.totals.prompt_tokens + found.totals.shared_tokens == asked
    assert (found.totals.shared_tokens > asked / 3) == bool(kept)
    assert found.tokens() == answers


class Scripted(Known):
    """Drafts the right continuation, a wrong one, or one with every second token wrong."""

    def __init__(self, case: Case, kind: str) -> None:
        self._answers, self._kind = dict(zip(case.prompts, case.answers, strict=True)), kind
        super().__init__(lambda prompt: self._answers[prompt])

    def draft(self, row: int, budget: int) -> list[int]:
        wrong = {"never": 1, "sometimes": 2}.get(self._kind, CAPACITY)
        rest = enumerate(super().draft(row, min(budget, 6)), 1)
        return [token % 300 + 1 if i % wrong == 0 else token for i, token in rest]


@pytest.mark.parametrize(("kind", "share"), [("never", 0.0), ("sometimes", None), ("always", 1.0)])
def test_wrong_and_right_drafts_change_no_answer(case, kind, share) -> None:
    found = answer(case, wrap=lambda proposer: Scripted(case, kind))
    drafted, accepted = int(found.totals.drafted.sum()), int(found.totals.accepted.sum())
    assert drafted > 50
    assert accepted == share * drafted if share is not None else 0 < accepted < drafted
    assert found.tokens() == case.answers


def test_float32_answers_are_equal_except_near_ties(case_of, capsys) -> None:
    case = case_of("qwen2", "float32")
    found = answer(case).tokens()
    model = reference(case.folder, "float32")
    for prompt, ours, theirs in zip(case.prompts, found, case.answers, strict=True):
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1]
        margin = float(logits.topk(2).values.diff().abs())
        with capsys.disabled():
            print(f"near-tie at token {at}: the two best are {margin:.2g} apart")
        assert margin < NEAR_TIE
