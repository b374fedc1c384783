"""Tests all options of a request with the official client and the running service."""

import json

import httpx
import pytest
from openai import BadRequestError
from serving import ALPHA, BETA, MODEL_LEN, complete, said, utf8

import tiny
from support import refused

pytestmark = [pytest.mark.ray, pytest.mark.redis]
SAMPLED = {"temperature": 1.0, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["alarm", "music"]}},
    "required": ["intent"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
# More ways to be behind a "b" than are followed; behind an "a", where the trial looks, is one.
GRAMMAR = 'start: "a"' + ' | "b"' * 3000


def test_another_seed_is_another_answer_and_without_one_they_differ(client):
    def answers(seeds):
        fields = [{} if seed is None else {"seed": seed} for seed in seeds]
        return {said(complete(client, temperature=1.0, **f))[0][0] for f in fields}

    assert len(answers([-1, 0, 1, 2**63 - 1])) > 1
    assert len(answers([None] * 4)) > 1


def test_several_answers_differ_are_the_same_streamed_and_equal_at_temperature_0(client):
    asked = {"n": 3, "temperature": 1.0, "seed": 3}
    whole = complete(client, **asked)
    assert len({text for text, _ in said(whole)}) == 3
    assert whole.usage.prompt_tokens == complete(client).usage.prompt_tokens
    assert whole.model_extra["metrics"] is None
    for more in ({}, {"draft": False}):
        assert said(complete(client, stream=True, extra=more, **asked)) == said(whole)
    assert said(complete(client, temperature=1.0, seed=3)) == said(whole)[:1]
    assert len(set(said(complete(client, n=3)))) == 1


def test_biased_tokens_are_forced_and_forbidden(service, client):
    tokenizer = service.tasks[ALPHA].tokenizer
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    (answer,) = complete(client, logprobs=0).choices
    first = ids[utf8(answer.logprobs.tokens[0])]
    other = (first + 1) % 100 + 50
    forced = complete(client, max_tokens=3, logit_bias={str(other): 100, str(first): -100})
    assert said(forced) == [(tokenizer.decode([other] * 3), "length")]
    forbidden = complete(client, max_tokens=1, logit_bias={str(first): -100})
    assert said(forbidden)[0][0] != tokenizer.decode([first])


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=str)
def test_the_tokens_told_make_the_text_and_the_end_is_not_told(client, fields):
    answered = complete(client, logprobs=0, **fields)
    (choice,) = answered.choices
    told = choice.logprobs
    assert b"".join(map(utf8, told.tokens)).decode(errors="replace") == choice.text
    ended = answered.usage.completion_tokens - len(told.tokens)
    assert ended == (choice.finish_reason == "stop")
    assert told.text_offset == sorted(told.text_offset)
    for name, offset in zip(told.tokens, told.text_offset, strict=True):
        assert name.startswith("bytes:") or choice.text[offset:].startswith(name)


def test_metrics_say_how_it_went(service, client):
    answered = complete(client, extra={"metrics": "detailed"})
    told = answered.model_extra["metrics"]
    drafts = told["speculative_decoding"]
    assert told["draft_index_version"] == service.status(ALPHA)["index_version"]
    assert told["generation_time_ms"] >= 0
    assert told["time_to_first_token_ms"] > 0
    assert drafts["num_spec_steps"] == len(drafts["per_step_drafted"]) > 0
    assert drafts["num_accepted_draft_tokens"] < answered.usage.completion_tokens
    plain = complete(client, extra={"draft": False}).model_extra["metrics"]
    assert plain["speculative_decoding"]["num_draft_tokens"] == 0
    assert "metrics" not in complete(client, extra={"metrics": "none"}).model_extra
    *_, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "no " * 600}, "prompt"),
        ({"max_tokens": 510}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "no " * 600}]}, "messages.0.content"),
        ({"temperature": 2.5}, "temperature"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_json": {"type": "no such type"}}, "guided_json"),
        ({"guided_grammar": "this is no grammar"}, "guided_grammar"),
        ({"guided_choice": ["ok", ""]}, "guided_choice"),
        ({"adapter": "gone"}, "adapter"),
        ({"top_p": 0, "temperature": 1}, "top_p"),
    ],
    ids=str,
)
def test_what_cannot_be_met_is_refused_by_name(client, fields, param):
    with refused(BadRequestError, param=param) as caught:
        complete(client, chat="messages" in fields, extra=fields)
    assert len(caught.value.message) > 20
    assert "messages" not in fields or str(MODEL_LEN) in caught.value.message


def test_a_label_that_does_not_fit_is_cut(client):
    label = "wake me up at nine am on friday"
    (choice,) = complete(
        client, extra={"guided_choice": [label], "max_tokens": 2, "top_p": 0}
    ).choices
    assert choice.finish_reason == "length"
    assert label.startswith(choice.text)
    assert label != choice.text != ""


@pytest.mark.parametrize("stream", [False, True])
def test_who_sent_a_guide_that_stops_in_an_answer_is_told_so(service, stream):
    (b,) = service.tasks[ALPHA].tokenizer.encode_prompt("b")
    body = {"model": ALPHA, "prompt": "hi", "guided_grammar": GRAMMAR, "stream": stream}
    body["logit_bias"] = {str(b): 100}
    response = httpx.post(f"{service.base}/v1/completions", json=body, timeout=60)
    assert "guided_grammar cannot be followed" in response.text
    assert "internal error" not in response.text
    if not stream:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_grammar")


def chatted(client, task, text, **more):
    ((text, end),) = said(complete(client, text, task=task, chat=True, **more))
    return text, end == "length"


@pytest.mark.parametrize("task", [ALPHA, BETA])
@pytest.mark.parametrize("rule", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_whole_and_streamed_are_those_of_chats(client, task, rule):
    for asked in tiny.SENTENCES[:4]:
        for most in (3, 40):
            expected = chatted(client, task, asked, max_tokens=most, **rule)
            fields = {"model": task, "input": asked, "max_output_tokens": most, "extra_body": rule}
            found = client.responses.create(**fields)
            assert (found.output_text, found.status == "incomplete") == expected
            *events, end = client.responses.create(**fields, stream=True)
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            last = end.response
            assert text == last.output_text == expected[0]
            assert (last.usage, last.status) == (found.usage, found.status)


def test_a_schema_holds_and_tokens_are_told(client):
    found = client.responses.create(
        model=ALPHA, input=tiny.SENTENCES[0], text={"format": FORMAT}, top_logprobs=2,
        include=["message.output_text.logprobs"], max_output_tokens=60,
    )  # fmt: skip
    assert json.loads(found.output_text)["intent"] in ("alarm", "music")
    (part,) = found.output[0].content
    told = "".join(token.token for token in part.logprobs)
    assert told.strip() == found.output_text  # some tokenizers begin an answer with a blank


def test_a_conversation_that_is_sent_back_is_taken(client):
    first = client.responses.create(model=ALPHA, input=tiny.SENTENCES[0], max_output_tokens=9)
    turns = [{"role": "user", "content": tiny.SENTENCES[0]}, *first.output]
    asked = {"role": "user", "content": tiny.SENTENCES[1]}
    found = client.responses.create(
        model=ALPHA, input=[*turns, asked], max_output_tokens=9, instructions="be brief"
    )
    assert found.output_text == chatted(client, ALPHA, tiny.SENTENCES[1], max_tokens=9)[0]


def test_earlier_responses_are_refused_by_name(client):
    with refused(BadRequestError, param="previous_response_id"):
        client.responses.create(model=ALPHA, input="a", previous_response_id="resp_1")
