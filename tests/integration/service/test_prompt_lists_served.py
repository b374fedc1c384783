"""Tests that each of many prompts in one request gets the same answer as alone."""

import asyncio
import itertools
import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import BadRequestError
from serving import ALPHA, BETA, MODEL_LEN, complete, said

import tiny
from support import eventually, refused
from tasc_runtime.llm import LLM

pytestmark = [pytest.mark.ray, pytest.mark.redis]

TEXTS = (*tiny.SENTENCES, *(f"{s}, or {t}" for s, t in itertools.pairwise(tiny.SENTENCES)))
SAMPLED = {"temperature": 1.0, "seed": 7}
MOST = 14  # places of a replica, and so most prompts of one request
LONG = {"model": ALPHA, "prompt": ["hi"] * MOST, "max_tokens": 200, "draft": False}
LONG["ignore_eos"] = True


@pytest.mark.parametrize("task", [ALPHA, BETA])
def test_each_prompt_gets_what_the_model_says_and_usage_is_the_sum(service, client, task):
    served = service.tasks[task]
    ids = [served.prompt(text, chat=False) for text in TEXTS]
    want = [served.plain(prompt, 24) for prompt in ids]
    for prompts in (list(TEXTS), [list(prompt) for prompt in ids]):
        answered = complete(client, prompts, task=task, max_tokens=24)
        assert said(answered) == [(each.text, each.reason) for each in want]
        assert answered.usage.prompt_tokens == sum(map(len, ids))
        assert answered.usage.completion_tokens == sum(each.tokens for each in want)
        more = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(complete(client, prompts, task=task, max_tokens=24, **more))
        assert (said(chunks), chunks[-1].usage) == (said(answered), answered.usage)


def test_n_answers_to_each_prompt_are_those_of_llm_generate(service, client):
    served = service.tasks[ALPHA]
    ids = [list(served.prompt(text, chat=False)) for text in TEXTS[:3]]
    asked = {"n": 2, "max_tokens": 12, **SAMPLED}
    sizes = {"rows": 4, "max_model_len": MODEL_LEN, "device": "cpu", "cost_aware": False}
    llm = LLM.from_task(ALPHA, service.redis_url, **sizes)
    want = [(one.text, one.finish_reason) for one in llm.generate(ids, **asked)]
    assert len(set(want)) == 6
    whole = complete(client, ids, **asked)
    assert said(whole) == want
    assert said(complete(client, ids, extra={"draft": False}, **asked)) == want
    assert said(complete(client, ids, stream=True, **asked)) == want
    assert said(complete(client, ids[0], **asked)) == want[:2]
    again = complete(client, [ids[0]] * 3, **SAMPLED)
    assert len(set(said(again))) == 3, "equal prompts of one list have answers of their own"


def test_logprobs_are_those_of_each_prompt_alone(client):
    alone = [complete(client, text, logprobs=2).choices[0].logprobs for text in TEXTS[:3]]
    together = [c.logprobs for c in complete(client, list(TEXTS[:3]), logprobs=2).choices]
    assert [found.tokens for found in together] == [want.tokens for want in alone]
    for found, want in zip(together, alone, strict=True):
        assert found.token_logprobs == pytest.approx(want.token_logprobs, abs=1e-6)
        assert found.text_offset == want.text_offset


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompts", "fields", "param", "named"),
    [
        ([*TEXTS[:4], "no " * 600], {}, "prompt.4", str(MODEL_LEN)),
        ([*([[1]] * 5), [1, 10**6]], {}, "prompt.5", str(10**6)),
        (["hi", "", "hi"], {}, "prompt.1", "prompt.1"),
        (["hi"] * 3, {"max_tokens": MODEL_LEN}, "prompt.", str(MODEL_LEN)),
        (["hi"] * (MOST + 1), {}, "prompt", str(MOST)),
        (["hi"] * 5, {"n": 3}, "n", "5 prompts"),
        (["hi", [1]], {}, "prompt.1", "prompt.1"),
        ([], {}, "prompt", "prompt"),
    ],
)
def test_one_prompt_at_fault_is_the_answer_and_no_other_is_sent(
    service, client, prompts, fields, param, named, stream
):
    with refused(BadRequestError, named) as caught:
        complete(client, prompts, stream=stream, **fields)
    assert caught.value.param.startswith(param)
    eventually(lambda: service.load(ALPHA) == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_lists_that_come_together_are_answered_whole_or_refused_whole(service, stream):
    def post(_):
        return httpx.post(f"{service.base}/v1/completions", json=LONG | more, timeout=60)

    more = {"stream": stream}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(post, range(4)))
    too_many = [response for response in found if response.status_code != 200]
    assert too_many, "there are places for one"
    for response in too_many:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "service_full")
        assert int(response.headers["retry-after"]) >= 1
    for response in found:
        if response.status_code == 200:
            ends = [f'"finish_reason":{json.dumps(reason)}' for reason in ("length", "error")]
            assert [response.text.count(end) for end in ends] == [MOST, 0]
    eventually(lambda: service.load(ALPHA) == (0, 0))


def test_a_retry_with_its_key_is_answered_alike(service):
    body = {"model": ALPHA, "prompt": list(TEXTS[:3]), "temperature": 1.0, "n": 2}
    headers = {"Idempotency-Key": uuid.uuid4().hex}

    async def ask():
        async with httpx.AsyncClient(base_url=service.base, timeout=60) as client:
            return (await client.post("/v1/completions", json=body, headers=headers)).json()

    first, second = (asyncio.run(ask()) for _ in range(2))
    assert first["choices"] == second["choices"]
    assert len(first["choices"]) == 6
