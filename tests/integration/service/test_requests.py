"""Tests all options of a request with the official client and the running service."""

import json

import httpx
import pytest
from openai import BadRequestError
from serving import ALPHA, MODEL_LEN, complete, said, utf8

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
        ({"messages": [{"role": "user", "content": "no " * 600}]}, "messages.0.content"),
        ({"temperature": 2.5}, "temperature"),
        ({"guided_regex": "(("}, "guided_regex"),
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


def test_a_schema_holds_and_tokens_are_told(client):
    found = client.responses.create(
        model=ALPHA, input=tiny.SENTENCES[0], text={"format": FORMAT}, top_logprobs=2,
        include=["message.output_text.logprobs"], max_output_tokens=60,
    )  # fmt: skip
    assert json.loads(found.output_text)["intent"] in ("alarm", "music")
    (part,) = found.output[0].content
    told = "".join(token.token for token in part.logprobs)
    assert told.strip() == found.output_text  # some tokenizers begin an answer with a blank
