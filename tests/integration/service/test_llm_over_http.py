"""Random requests of every parameter: the answers over HTTP are those of `LLM.generate`."""

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import ADAPTERS, ALPHA, BETA, MODEL_LEN

import tiny
from tasc_runtime.llm import LLM

pytestmark = [pytest.mark.ray, pytest.mark.redis]

REQUESTS, AT_ONCE = 200, 3
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
FORMS = (
    {"guided_choice": ["wake up", "wake me", "play music", "nine"]},
    {"guided_regex": "[a-f]{3,9}(, [0-9]{2}){0,2}"},
    {"guided_json": SCHEMA},
    {"guided_grammar": 'start: ("ab" | "ba") start | "c"'},
    {"response_format": JSON_SCHEMA},
)


def random_request(chance: random.Random):
    """A task, a text, whether it goes through the template, and options."""
    any_of = {
        "temperature": chance.uniform(0, 2),
        "top_p": chance.uniform(0.3, 1),
        "top_k": chance.randrange(50),
        "min_p": chance.uniform(0, 0.2),
        "presence_penalty": chance.uniform(-2, 2),
        "frequency_penalty": chance.uniform(-2, 2),
        "repetition_penalty": chance.uniform(0.8, 1.5),
        "logit_bias": {str(chance.randrange(250)): chance.uniform(-50, 20)},
        "n": chance.randint(1, 3),
        "logprobs": chance.randrange(4),
        "draft": False,
    }
    options = {name: value for name, value in any_of.items() if chance.random() < 0.3}
    ends = ({}, {"stop": chance.choice(["a", ["e", ", "]])}, {"ignore_eos": True})
    options |= chance.choice(FORMS) if chance.random() < 0.4 else chance.choice(ends)
    options |= {"max_tokens": chance.randint(40, 60), "seed": chance.randrange(-9, 9)}
    task = chance.choice([ALPHA, BETA])
    if task == BETA and chance.random() < 0.7:
        options["adapter"] = chance.choice([*ADAPTERS])
    text = " ".join(chance.sample(tiny.SENTENCES, 2))
    return task, text, chance.random() < 0.5, options


def over_http(client: httpx.Client, task: str, text: str, chat: bool, options):
    body = {"model": task, **options}
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
        if "logprobs" in options:
            body |= {"logprobs": True, "top_logprobs": options["logprobs"]}
        response = client.post("/v1/chat/completions", json=body)
    else:
        response = client.post("/v1/completions", json=body | {"prompt": text})
    choices = response.raise_for_status().json()["choices"]
    said = [((c["message"]["content"] if chat else c["text"]), c["finish_reason"]) for c in choices]
    told = [c["logprobs"] or {} for c in choices]
    if chat:
        return said, [token["logprob"] for each in told for token in each.get("content", [])]
    return said, [logprob for each in told for logprob in each.get("token_logprobs", [])]


def in_process(llm: LLM, text: str, chat: bool, options):
    answers = llm.generate(text if chat else llm.tokenizer.encode_prompt(text), **options)
    logprobs = [token.logprob for answer in answers for token in answer.logprobs]
    return [(answer.text, answer.finish_reason) for answer in answers], logprobs


def test_random_requests_are_answered_as_by_llm_generate(service, seed):
    chance = random.Random(seed)
    requests = [random_request(chance) for _ in range(REQUESTS)]
    sizes = {"rows": 4, "max_model_len": MODEL_LEN, "device": "cpu", "cost_aware": False}
    llms = {task: LLM.from_task(task, service.redis_url, **sizes) for task in (ALPHA, BETA)}
    with (
        httpx.Client(base_url=service.base, timeout=120) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        found = list(pool.map(lambda request: over_http(client, *request), requests))
    for (task, *request), (said, logprobs) in zip(requests, found, strict=True):
        expected, expected_logprobs = in_process(llms[task], *request)
        assert said == expected, (task, request)
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-6), (task, request)
    assert len({str(said) for said, _ in found}) > REQUESTS / 2
    assert sum(len(logprobs) for _, logprobs in found) > REQUESTS
    assert all(llm.summary().accepted > 0 for llm in llms.values())
