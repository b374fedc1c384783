"""Tests that each of many prompts in one request gets the same answer as alone."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import BadRequestError
from serving import ALPHA, BETA, MODEL_LEN, complete, said

import tiny
from support import eventually, refused

pytestmark = [pytest.mark.ray, pytest.mark.redis]

TEXTS = (*tiny.SENTENCES, *(f"{s}, or {t}" for s, t in itertools.pairwise(tiny.SENTENCES)))
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
