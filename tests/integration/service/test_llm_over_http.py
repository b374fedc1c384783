"""Random requests of every parameter: the answers over HTTP are those of `LLM.generate`."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from serving import ADAPTERS, ALPHA, BETA, MODEL_LEN, TEXT, choices_of, complete, utf8

import tiny
from tasc_runtime.llm import LLM

pytestmark = [pytest.mark.ray, pytest.mark.redis]

REQUESTS, AT_ONCE = 200, 3
SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["alarm", "music"]}, "sure": {"type": "boolean"}},
    "required": ["intent", "sure"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
CHOICES = ["wake up", "wake me", "play music", "nine"]
PATTERN = "[a-f]{3,9}(, [0-9]{2}){0,2}"


def by_schema(text):
    found = json.loads(text)
    assert list(found) == ["intent", "sure"]
    return found["intent"] in ("alarm", "music") and isinstance(found["sure"], bool)


# By name: the options of a request, and a check of a finished answer.
FORMS = {
    "guided_choice": (CHOICES, CHOICES.__contains__),
    "guided_regex": (PATTERN, re.compile(PATTERN).fullmatch),
    "guided_json": (SCHEMA, by_schema),
    "guided_grammar": ('start: ("ab" | "ba") start | "c"', re.compile("(ab|ba)*c").fullmatch),
    "response_format": (JSON_SCHEMA, by_schema),
}


def form_of(name):
    return {name: FORMS[name][0]}


def random_request(chance: random.Random):
    """A task, a text, whether it goes through the template, whether it is streamed, and options."""
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
    options |= form_of(chance.choice([*FORMS])) if chance.random() < 0.4 else chance.choice(ends)
    options |= {"max_tokens": chance.randint(40, 60), "seed": chance.randrange(-9, 9)}
    task = chance.choice([ALPHA, BETA])
    if task == BETA and chance.random() < 0.7:
        options["adapter"] = chance.choice([*ADAPTERS])
    text = " ".join(chance.sample(tiny.SENTENCES, 2))
    return task, text, chance.random() < 0.5, chance.random() < 0.5, options


def tokens_of(logprobs, most):
    """Returns bytes and log-probability of each token, and those of the most likely tokens."""
    if hasattr(logprobs, "content"):
        return [
            (bytes(token.bytes), token.logprob, *(likely.logprob for likely in token.top_logprobs))
            for token in logprobs.content
        ]
    tops = logprobs.top_logprobs or [{}] * len(logprobs.tokens)
    return [
        (utf8(name), value, *sorted(top.values(), reverse=True)[:most])
        for name, value, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=True)
    ]


def over_http(client: OpenAI, task: str, text: str, chat: bool, stream: bool, options):
    most = options.get("logprobs")
    as_chat = {"logprobs": True, "top_logprobs": most} if chat and most is not None else {}
    answered = complete(client, text, task=task, chat=chat, stream=stream, extra=options | as_chat)
    chunks = list(answered) if stream else [answered]
    reported = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    reported.sort(key=lambda choice: choice.index)
    return choices_of(chunks), [
        token for choice in reported for token in tokens_of(choice.logprobs, most)
    ]


def in_process(llm: LLM, text: str, chat: bool, options):
    answers = llm.generate(text if chat else llm.tokenizer.encode_prompt(text), **options)
    tokens = [token for answer in answers for token in answer.logprobs]
    reported = [
        (token.utf8, token.logprob, *(likely for _, likely in token.top)) for token in tokens
    ]
    return [(answer.text, answer.finish_reason) for answer in answers], reported


def test_random_requests_over_http_equal_llm_generate(service, client, seed):
    chance = random.Random(seed)
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 200}
    requests = [(ALPHA, TEXT, True, False, form_of(name) | sampled) for name in FORMS]
    requests += [random_request(chance) for _ in range(REQUESTS)]
    sizes = {"rows": 4, "max_model_len": MODEL_LEN, "device": "cpu", "cost_aware": False}
    llms = {task: LLM.from_task(task, service.redis_url, **sizes) for task in (ALPHA, BETA)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda request: over_http(client, *request), requests))
    assert {end for answers, _ in found[: len(FORMS)] for _, end in answers} == {"stop"}
    for request, (answers, tokens) in zip(requests, found, strict=True):
        task, text, chat, _, options = request
        expected, expected_tokens = in_process(llms[task], text, chat, options)
        assert answers == expected, request
        for (name, *values), (wanted, *own) in zip(tokens, expected_tokens, strict=True):
            assert (name, values) == (wanted, pytest.approx(own, abs=1e-6)), request
        for form in FORMS.keys() & options.keys():
            holds = FORMS[form][1]
            assert all(holds(text) for text, end in answers if end == "stop"), request
    assert len({str(answers) for answers, _ in found}) > REQUESTS / 2
    assert sum(len(tokens) for _, tokens in found) > REQUESTS
    assert all(llm.summary().accepted > 0 for llm in llms.values())
