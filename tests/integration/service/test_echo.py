"""Tests echoed prompts with log-probabilities, as requested by evaluation harnesses."""

import itertools
from functools import partial

import pytest
import torch
from serving import ALPHA, BETA, complete, said

import tiny

pytestmark = [pytest.mark.ray, pytest.mark.redis]

TEXTS = [*tiny.SENTENCES, *(f"{a}, or {b}" for a, b in itertools.pairwise(tiny.SENTENCES))][:7]
echoed = partial(complete, echo=True)


def own(task, ids):
    """Returns ``[len(ids) - 1, vocab]`` log-probabilities after the first token by transformers."""
    with torch.inference_mode():
        return task.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


@pytest.mark.parametrize("task", [ALPHA, BETA])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_log_probabilities_of_prompts_are_the_models_own(service, client, task, most):
    made = service.tasks[task]
    prompts = [list(made.prompt(text, chat=False)) for text in TEXTS]
    for _ in range(2):  # later prompts share beginnings with those before
        answered = echoed(client, prompts, task=task, max_tokens=most, logprobs=2)
        assert answered.usage.prompt_tokens == sum(map(len, prompts))
        assert (answered.usage.completion_tokens > 0) == (most > 0)
        tokens = 0
        for choice, ids in zip(answered.choices, prompts, strict=True):
            want, told = own(made, ids), choice.logprobs
            answer = len(told.tokens) - len(ids)
            tokens += answer
            assert choice.text.startswith(made.tokenizer.decode(ids))
            assert told.token_logprobs[0] is None
            assert told.top_logprobs[0] is None
            found = torch.tensor(told.token_logprobs[1 : len(ids)], dtype=torch.float64)
            torch.testing.assert_close(
                found, want.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4, rtol=0
            )
            for top, line in zip(told.top_logprobs[1 : len(ids)], want, strict=True):
                assert max(top.values()) == pytest.approx(line.max().item(), abs=1e-4)
                assert 2 <= len(top) <= 3
        # The end of sequence counts too: harnesses cut the answer's tokens off by their number.
        assert tokens == answered.usage.completion_tokens


def test_text_and_offsets_begin_with_the_prompt_as_it_was_sent(service, client):
    for text in TEXTS:
        (plain,) = echoed(client, text, echo=False, max_tokens=12).choices
        (choice,) = echoed(client, text, max_tokens=12, logprobs=0).choices
        assert (choice.text, choice.finish_reason) == (text + plain.text, plain.finish_reason)
        told = choice.logprobs
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            if "bytes:" not in token and offset < len(choice.text):
                assert choice.text[offset:].startswith(token)
        (bare,) = echoed(client, text, max_tokens=0).choices
        assert (bare.text, bare.finish_reason, bare.logprobs) == (text, "length", None)


def test_streamed_it_is_the_same(client):
    asked = {"max_tokens": 12, "logprobs": 1, "n": 2, "temperature": 1, "seed": 3}
    for prompt in (TEXTS[0], TEXTS[:2]):
        whole = echoed(client, prompt, **asked)
        chunks = list(echoed(client, prompt, stream=True, **asked))
        assert said(chunks) == said(whole)
        for choice in whole.choices:
            parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            told = [p for c in parts if c.logprobs for p in c.logprobs.token_logprobs]
            assert told[0] is choice.logprobs.token_logprobs[0] is None
            assert told[1:] == pytest.approx(choice.logprobs.token_logprobs[1:])
