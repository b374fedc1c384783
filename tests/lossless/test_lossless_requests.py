"""Tests that answers are the same with and without drafts, alone or among seven others."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from lossless_cases import Case, reference
from request_grid import WAYS, Way, Ways, answer_all_ways, random_requests

from choosing_reference import reference_choice
from support import replace, ruled
from tasc_engine import Request, Sampling
from tasc_engine.sampling.sampler import uniforms


@pytest.fixture(scope="module")
def requests(case: Case, everything: bool, seed: int) -> list[Request]:
    return random_requests(case, 150 if everything else 75, seed)


@pytest.fixture(scope="module")
def ways(case: Case, requests: list[Request]) -> Ways:
    return answer_all_ways(case, requests)


def test_random_requests_have_equal_answers_with_every_way_of_drafting(ways: Ways) -> None:
    for way in WAYS:
        totals = ways.totals[way]
        accepted, drafted = int(totals.accepted.sum()), int(totals.drafted.sum())
        assert accepted > 50 if way.draft else accepted == drafted == 0
        assert not way.draft or drafted - accepted > 50
    assert all(ways.equal())


def test_sampled_tokens_equal_the_sampling_rule_on_model_logits(
    case: Case, requests: list[Request], ways: Ways, everything: bool
) -> None:
    """The reference decodes one token at a time in transformers, without a cache."""
    model, checked = reference(case.folder), 0
    for request, result in zip(requests, ways.answers[Way(8, True)], strict=True):
        if request.guide is None:
            assert list(result.tokens) == _by_hand(case, model, request, len(result.tokens))
            checked += len(result.tokens)
    assert checked > (300 if everything else 0)


def _by_hand(
    case: Case, model, request: Request, count: int, ends: Sequence[int] = ()
) -> list[int]:
    answer: list[int] = []
    late = {*range(case.tokenizer.vocab_size)}.difference(ends)
    numbers = uniforms(request.sampling, 0, count)
    while len(answer) < count:
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt, *answer]])).logits[0, -1].numpy()
        number = numbers[len(answer)]
        allowed = late if len(answer) < request.min_tokens else None
        answer.append(
            reference_choice(logits, request.sampling, request.prompt, answer, number, allowed)
        )
    return answer


def test_logprobs_with_drafts_equal_the_models_logprobs(case, requests, ways) -> None:
    model, checked = reference(case.folder), 0
    for request, result in zip(requests, ways.answers[Way(8, True)], strict=True):
        if request.logprobs is None:
            assert result.logprobs == ()
            continue
        assert [one.token for one in result.logprobs] == list(result.tokens)
        with torch.inference_mode():
            ids = torch.tensor([[*request.prompt, *result.tokens[:-1]]])
            found = model(ids).logits[0, len(request.prompt) - 1 :].log_softmax(-1)
        for one, line in zip(result.logprobs, found, strict=True):
            assert one.logprob == pytest.approx(float(line[one.token]), abs=1e-5)
            assert [i for i, _ in one.top] == line.topk(request.logprobs).indices.tolist()
            checked += 1
    assert checked > 50


def test_forced_tokens_need_no_forward_pass(ways: Ways, everything: bool) -> None:
    plain, drafted = ways.totals[Way(1, False)], ways.totals[Way(8, True)]
    assert plain.forced_tokens > (50 if everything else 0)
    assert drafted.forced_tokens > 0  # where a draft ends; within it they are accepted
    assert plain.emitted_tokens == plain.row_steps + plain.forced_tokens
    assert drafted.row_steps < plain.row_steps


def test_stop_tokens_and_min_tokens_act_equally_with_every_way_of_drafting(case, requests, seed):
    rng = random.Random(seed)
    stops = tuple(range(1, case.tokenizer.vocab_size, 9))
    free = [r for r in requests if r.guide is None and r.max_tokens > 1][:24]
    asked = [
        replace(r, stop=(), stop_token_ids=stops, min_tokens=rng.choice([0, 2, 5, r.max_tokens]))
        for r in free
    ]
    asked = [replace(r, min_tokens=min(r.min_tokens, r.max_tokens)) for r in asked]
    found, model, reasons = answer_all_ways(case, asked), reference(case.folder), set()
    drafted = found.totals[Way(8, True)]
    assert 0 < drafted.accepted.sum() < drafted.drafted.sum()
    assert all(found.equal())
    for request, result in zip(asked, found.answers[Way(8, True)], strict=True):
        ends = stops if request.ignore_eos else (*stops, *case.tokenizer.eos_ids)
        emitted = list(result.tokens)
        assert emitted == _by_hand(case, model, request, len(emitted), ends)
        assert not {*ends} & {*emitted[:-1]}
        assert (result.finish_reason == "stop") == (emitted[-1] in ends)
        assert len(emitted) > request.min_tokens or len(emitted) == request.max_tokens
        assert result.text == case.tokenizer.decode(emitted)
        reasons.add((result.finish_reason, request.min_tokens > 0))
    assert len(reasons) == 4


def test_end_of_sequence_ends_an_answer_unless_ignored(case: Case) -> None:
    ends = tuple((e, 100.0) for e in case.tokenizer.eos_ids)
    asked = [
        Request(
            str(ignored), case.prompts[0], 5, **ruled(Sampling(logit_bias=ends)), ignore_eos=ignored
        )
        for ignored in (False, True)
    ]
    ended, went_on = answer_all_ways(case, asked).answers[Way(8, True)]
    assert (len(ended.tokens), ended.finish_reason) == (1, "stop")
    assert (len(went_on.tokens), went_on.finish_reason) == (5, "length")


def test_random_numbers_depend_only_on_seed_choice_and_position() -> None:
    rule = Sampling(temperature=1.0, seed=2**64 - 1, choice=3)
    whole = uniforms(rule, 0, 200)
    assert ((whole >= 0) & (whole < 1)).all()
    for begin in (0, 1, 3, 4, 5, 63, 150):
        assert np.array_equal(uniforms(rule, begin, 50), whole[begin : begin + 50])
    for other in (replace(rule, seed=1), replace(rule, choice=2), replace(rule, prompt=1)):
        assert not np.isin(uniforms(other, 0, 200), whole).any()
