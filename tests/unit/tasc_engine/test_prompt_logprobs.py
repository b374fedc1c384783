"""Log-probabilities of prompts are those of the model's own forward over the whole prompt."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasc_engine import GenerationRequest

RNG = np.random.default_rng(5)
PROMPTS = [tuple(RNG.integers(3, 300, n).tolist()) for n in (40, 1, 2, 23, 40)]
PROMPTS[4] = (*PROMPTS[0][:30], *PROMPTS[4][30:])  # shares a beginning


def expected(folder, prompt):
    """``[len(prompt) - 1, vocab]`` of the tokens behind the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].double().log_softmax(-1)


def close(result, folder, prompt, n):
    want = expected(folder, prompt)
    assert len(result.logprobs) == len(prompt) - 1 + len(result.tokens)
    for place, (found, token) in enumerate(zip(result.logprobs, prompt[1:], strict=False)):
        assert found.token == token
        assert found.logprob == pytest.approx(want[place, token].item(), abs=1e-4)
        values, _ = want[place].topk(n)
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [want[place, i].item() for i, _ in found.top] == pytest.approx(
            values.tolist(), abs=1e-4
        )


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_they_are_the_models_own_whatever_shares_the_batch(make_engine, folder, chunk):
    engine = make_engine(rows=3, prefill_chunk=chunk)
    alone = [GenerationRequest(f"p{i}", prompt, 12) for i, prompt in enumerate(PROMPTS)]
    tokens = {r.id: r.tokens for r in make_engine(rows=1).generate(alone)}
    scored = [
        GenerationRequest(f"s{i}", prompt, 1 + i, logprobs=3, prompt_logprobs=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    for _ in range(3):  # what prompts share is kept from the second turn on
        mixed = [one for pair in zip(scored, alone, strict=True) for one in pair]
        for result in engine.generate(mixed):
            assert result.tokens == tokens[f"p{result.id[1]}"][: len(result.tokens)]
            if result.id[0] == "s":
                close(result, folder, PROMPTS[int(result.id[1])], 3)
    engine.check_integrity()


def test_streamed_they_come_once_with_the_first_tokens(make_engine, folder):
    engine = make_engine(prefill_chunk=8)
    one = GenerationRequest("a", PROMPTS[0], 12, stream=True, logprobs=0, prompt_logprobs=True)
    engine.submit(one)
    deltas = [delta for _ in range(40) for delta in engine.step()]
    assert len(deltas[0].logprobs) == len(PROMPTS[0]) - 1 + len(deltas[0].tokens)
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in deltas[1:])
    told = [logprob for delta in deltas for logprob in delta.logprobs]
    assert tuple(told) == deltas[-1].result.logprobs
