"""Tests that drafts never change an answer, compared with transformers' ``generate``."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from lossless_cases import LONGEST, PAPER, Case, answer, answered_alone, reference

from tasc_draft import Drafts, DraftSettings
from tasc_draft.settings import MIXTURES
from tasc_engine import Request
from tasc_text import TaskTokenizer
from wrong_indexes import wrong_index

NEAR_TIE = 1e-5


def accepted_and_rejected(totals) -> tuple[int, int]:
    accepted = int(totals.accepted.sum())
    return accepted, int(totals.drafted.sum()) - accepted


def test_every_architecture_answers_like_generate(any_case: Case) -> None:
    found = answer(any_case)
    assert min(accepted_and_rejected(found.totals)) > 20
    assert found.tokens() == any_case.answers


WAYS: list[dict[str, Any]] = [
    *(
        {"settings": DraftSettings(min_prob=0.0, num_speculative_tokens=n), "branching": branching}
        for n in (1, 2, 7, 16)
        for branching in (True, False)
    ),
    *({"settings": dataclasses.replace(PAPER, n_max=n)} for n in range(2, 9)),
    *({"settings": dataclasses.replace(PAPER, corpus_weight=weight)} for weight in (0.0, 1.0)),
    {"settings": DraftSettings(min_prob=0.0, learning_rate=1.0)},
    *({"rows": n} for n in range(1, 9)),
    *({"prefill_chunk": n} for n in (1, 7, 1000)),
]


def name(way: dict[str, Any]) -> str:
    """Returns a test id such as ``rows=4``, with the settings that differ from the defaults."""
    default, told = vars(DraftSettings()).items(), {**way}
    told |= dict(sorted(vars(told.pop("settings", DraftSettings())).items() - default))
    return " ".join(f"{key}={value}" for key, value in told.items())


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_every_way_of_drafting_answers_alike(case: Case, way: dict[str, Any]) -> None:
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
def test_every_mixture_answers_alike(case: Case, begun: Any, mixture: str) -> None:
    settings = DraftSettings(mixture=mixture, min_prob=0.0)
    found = answer(case, settings=settings, requests=begun[0])
    assert min(accepted_and_rejected(found.totals)) > 0
    assert found.tokens() == begun[1]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_an_index_that_is_wrong_everywhere_within_bounds_changes_no_answer(
    case: Case, begun: Any, mixture: str, seed: int
) -> None:
    settings = DraftSettings(mixture=mixture, min_prob=0.0)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        index = wrong_index(case.index(), rng)
        found = answer(case, settings=settings, index=index, requests=begun[0])
        assert found.totals.drafted.sum() > 0
        assert found.tokens() == begun[1]


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_prompts_that_begin_alike_answer_alike(case: Case, alike: Any, kept: int) -> None:
    requests, answers = alike
    found = answer(case, requests=requests, rows=2, prefix_cache_bytes=kept)
    asked = sum(len(request.prompt) for request in requests)
    assert found.totals.prompt_tokens + found.totals.shared_tokens == asked
    assert (found.totals.shared_tokens > asked / 3) == bool(kept)
    assert found.tokens() == answers


class ScriptedProposer:
    """Drafts from a script: the right continuation, a wrong one, or every second token right."""

    max_depth = PAPER.num_speculative_tokens

    def __init__(self, case: Case, kind: str) -> None:
        self._answers = dict(zip(case.prompts, case.answers, strict=True))
        self._kind = kind
        self._rows: dict[int, list[int]] = {}

    def start(self, row, prompt, labels=None):
        self._rows[row] = list(self._answers[tuple(prompt.tolist())])

    def propose(self, rows, budget, least=None):
        chains = [
            [self._wrong(t, i) for i, t in enumerate(self._rows[int(r)][: min(b, 6)])]
            for r, b in zip(rows, budget, strict=True)
        ]
        places = np.array([i for chain in chains for i in range(len(chain))], np.int32)
        return Drafts(
            tokens=np.array([t for chain in chains for t in chain], np.int32),
            parents=places - 1,
            depths=(places + 1).astype(np.int16),
            offsets=np.cumsum([0, *map(len, chains)]).astype(np.int32),
            logp=np.zeros(len(places), np.float32),
            source=np.zeros(len(places), np.int8),
        )

    def observe(self, row, tokens, hidden=None):
        del self._rows[row][: len(tokens)]

    def finish(self, row):
        del self._rows[row]

    def _wrong(self, token: int, i: int) -> int:
        wrong = self._kind == "never" or (self._kind == "sometimes" and i % 2 == 1)
        return token % 300 + 1 if wrong else token


@pytest.mark.parametrize(("kind", "share"), [("never", 0.0), ("sometimes", None), ("always", 1.0)])
def test_drafts_never_sometimes_and_always_right(case, kind, share) -> None:
    found = answer(case, wrap=lambda proposer: ScriptedProposer(case, kind))
    drafted, accepted = int(found.totals.drafted.sum()), int(found.totals.accepted.sum())
    assert drafted > 50
    assert accepted == share * drafted if share is not None else 0 < accepted < drafted
    assert found.tokens() == case.answers


def test_end_of_sequence_inside_a_draft_ends_the_answer(case: Case) -> None:
    """The model emits end-of-sequence in mid-answer; draft tokens after it are cut off."""
    longest = max(range(len(case.answers)), key=lambda i: len(case.answers[i]))
    told = case.answers[longest]
    ends = told[6]
    tokenizer = TaskTokenizer(case.folder / "tokenizer.json", [ends])
    request = Request("0", case.prompts[longest], LONGEST)
    found = answer(dataclasses.replace(case, tokenizer=tokenizer), requests=[request])
    assert list(found.results["0"].tokens) == told[: told.index(ends) + 1]
    assert found.results["0"].finish_reason == "stop"


def test_float32_is_equal_but_for_near_ties(case_of, capsys) -> None:
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
