"""Tests requests with the official client and the running service: lists, echoes and refusals."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from openai import BadRequestError
from serving import ALPHA, BETA, MODEL_LEN, choices_of, complete

import tiny
from support import eventually, refused

pytestmark = [pytest.mark.ray, pytest.mark.redis]
TEXTS = [*tiny.SENTENCES, *(f"{s}, or {t}" for s, t in itertools.pairwise(tiny.SENTENCES))]
MOST = 14  # places of a replica, and so most prompts of one request
LONG = {"model": ALPHA, "prompt": ["hi"] * MOST, "max_tokens": 200, "draft": False}
LONG["ignore_eos"] = True
SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["alarm", "music"]}},
    "required": ["intent"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
# After a "b" the grammar has more branches than are followed; the trial at admission looks after
# an "a" only, where it has one.
GRAMMAR = 'start: "a"' + ' | "b"' * 3000


@pytest.mark.parametrize("task", [ALPHA, BETA])
def test_each_prompt_of_a_list_has_the_models_answer_and_usage_is_the_sum(service, client, task):
    served = service.tasks[task]
    ids = [served.prompt(text, chat=False) for text in TEXTS]
    want = [served.plain(prompt, 24) for prompt in ids]
    for prompts in (TEXTS, [list(prompt) for prompt in ids]):
        answered = complete(client, prompts, task=task, max_tokens=24)
        assert choices_of(answered) == [(each.text, each.reason) for each in want]
        assert answered.usage.prompt_tokens == sum(map(len, ids))
        assert answered.usage.completion_tokens == sum(each.tokens for each in want)
        more = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(complete(client, prompts, task=task, max_tokens=24, **more))
        assert (choices_of(chunks), chunks[-1].usage) == (choices_of(answered), answered.usage)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"prompt": [*TEXTS[:4], "no " * 600]}, "prompt.4", str(MODEL_LEN)),
        ({"prompt": [*([[1]] * 5), [1, 10**6]]}, "prompt.5", str(10**6)),
        ({"prompt": ["hi", "", "hi"]}, "prompt.1", "prompt.1"),
        ({"messages": [{"role": "user", "content": "no " * 600}]}, "messages.0.content", "512"),
        ({"guided_regex": "(("}, "guided_regex", "guided_regex"),
    ],
    ids=["a long prompt", "an unknown token", "an empty prompt", "a long message", "a guide"],
)
def test_invalid_field_is_named_and_no_prompt_is_answered(
    service, client, fields, param, named, stream
):
    with refused(BadRequestError, named, param=param):
        complete(client, chat="messages" in fields, stream=stream, extra=fields)
    eventually(lambda: service.load(ALPHA) == (0, 0))


@pytest.mark.parametrize("stream", [False, True])
def test_concurrent_prompt_lists_are_answered_or_refused_as_a_whole(service, stream):
    def post(_):
        body = LONG | {"stream": stream}
        return httpx.post(f"{service.base}/v1/completions", json=body, timeout=60)

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


@pytest.mark.parametrize("task", [ALPHA, BETA])
@pytest.mark.parametrize("most", [0, 5])
def test_log_probabilities_of_echoed_prompts_equal_the_models(service, client, task, most):
    made = service.tasks[task]
    prompts = [list(made.prompt(text, chat=False)) for text in TEXTS[:7]]
    for _ in range(2):  # later prompts share beginnings with those before
        answered = complete(client, prompts, task=task, echo=True, max_tokens=most, logprobs=2)
        assert answered.usage.prompt_tokens == sum(map(len, prompts))
        assert (answered.usage.completion_tokens > 0) == (most > 0)
        tokens = 0
        for choice, ids in zip(answered.choices, prompts, strict=True):
            with torch.inference_mode():  # the log-probabilities by transformers
                want = made.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
            logprobs = choice.logprobs
            tokens += len(logprobs.tokens) - len(ids)
            assert choice.text.startswith(made.tokenizer.decode(ids))
            assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
            found = torch.tensor(logprobs.token_logprobs[1 : len(ids)], dtype=torch.float64)
            chosen = want.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            torch.testing.assert_close(found, chosen, atol=1e-4, rtol=0)
            for top, line in zip(logprobs.top_logprobs[1 : len(ids)], want, strict=True):
                assert max(top.values()) == pytest.approx(line.max().item(), abs=1e-4)
                assert 2 <= len(top) <= 3
        # The end of sequence counts too: harnesses cut the answer's tokens off by their number.
        assert tokens == answered.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_guide_that_cannot_be_followed_is_named_in_the_error(service, stream):
    (b,) = service.tasks[ALPHA].tokenizer.encode_prompt("b")
    body = {"model": ALPHA, "prompt": "hi", "guided_grammar": GRAMMAR, "stream": stream}
    body["logit_bias"] = {str(b): 100}
    response = httpx.post(f"{service.base}/v1/completions", json=body, timeout=60)
    assert "guided_grammar cannot be followed" in response.text
    assert "internal error" not in response.text
    if not stream:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_grammar")


def test_response_follows_its_schema_and_has_its_tokens(client):
    found = client.responses.create(
        model=ALPHA, input=tiny.SENTENCES[0], text={"format": FORMAT}, top_logprobs=2,
        include=["message.output_text.logprobs"], max_output_tokens=60,
    )  # fmt: skip
    assert json.loads(found.output_text)["intent"] in ("alarm", "music")
    (part,) = found.output[0].content
    text = "".join(token.token for token in part.logprobs)
    assert text.strip() == found.output_text  # some tokenizers begin an answer with a blank
