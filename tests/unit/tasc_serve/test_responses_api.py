"""Tests ``/v1/responses``: calls of replicas, answers in OpenAI's types, and refusals."""

import json
from dataclasses import replace
from typing import get_args

import pytest
from fake_backend import RESPONSES, STATUS, TASK, FakeBackend, Service, answer, error_of
from openai.types.responses import Response, ResponseIncludable, ResponseStreamEvent
from pydantic import TypeAdapter

from tasc_engine import GuideSpec
from tasc_runtime.protocol import Refusal
from tasc_text import Conversation, Message

EVENTS = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"a": {"const": "é"}}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
ANSWERED = {
    "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
    "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
}  # fmt: skip


def asked(backend, limits=None, /, **more):
    body = {"model": TASK, "input": "hi", **more}
    return Service(backend, **(limits or {})).ask("POST", RESPONSES, content=json.dumps(body))


def called(**more):
    backend = FakeBackend(*answer("yes"), status=replace(STATUS, chat=True))
    response = asked(backend, **more)
    assert response.status_code == 200, response.text
    (call,) = backend.calls
    return call


def streamed(*script, **more):
    response = asked(FakeBackend(*script), stream=True, **more)
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(EVENTS.validate_python(content))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_answer_is_valid_as_an_openai_response(reason):
    script = answer("Hel", "lo", reason=reason, logprobs=2)
    found = asked(FakeBackend(*script), max_output_tokens=4, **LOGPROBS).json()
    response = Response.model_validate(found)
    cut = reason == "length"
    assert response.output_text == "Hello"
    assert response.status == ("incomplete" if cut else "completed")
    assert (response.incomplete_details is not None) == cut
    assert not cut or response.incomplete_details.reason == "max_output_tokens"
    (message,) = response.output
    (part,) = message.content
    assert message.status == response.status
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * 4
    assert "".join(token.token for token in part.logprobs) == "Hello"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (5, 4, 9)
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] == 2
    assert "metrics" not in asked(FakeBackend(*script), metrics="none").json()


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_stream_events_are_valid_as_openai_events_and_end_with_the_same_response(reason):
    script = answer("Hel", "", "lo", reason=reason, logprobs=2)
    events = streamed(*script, **LOGPROBS)
    kinds = [event.type.removeprefix("response.") for event in events]
    delta = ["output_text.delta"] * 2
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *delta,
        "output_text.done", "content_part.done", "output_item.done",
        "incomplete" if reason == "length" else "completed",
    ]  # fmt: skip
    first, last = events[0].response, events[-1].response
    assert (first.status, first.output, first.usage) == ("in_progress", [], None)
    whole = Response.model_validate(asked(FakeBackend(*script), **LOGPROBS).json())
    ids = {"id", "created_at", "output"}
    assert last.model_dump(exclude=ids) == whole.model_dump(exclude=ids)
    assert first.id == last.id
    assert last.output_text == whole.output_text == "".join(event.delta for event in events[4:6])
    deltas = [token for event in events[4:6] for token in event.logprobs]
    assert [token.token for token in deltas] == [
        t.token for t in whole.output[0].content[0].logprobs
    ]
    assert [token.token for token in events[6].logprobs] == [token.token for token in deltas]
    assert {event.item_id for event in events[3:8]} == {last.output[0].id}


def test_input_and_instructions_become_a_chat_conversation():
    hi = {"role": "user", "content": [{"type": "input_text", "text": "h"}] * 2}
    call = called(input=[hi, ANSWERED, {"role": "user", "content": "bye"}], instructions="be brief")
    turns = (
        Message("system", "be brief"), Message("user", "hh"), Message("assistant", "hello"),
        Message("user", "bye"),
    )  # fmt: skip
    assert (call.prompt, call.templated) == (Conversation(turns), True)
    assert called(input="hi").prompt == called(input=[{"role": "user", "content": "hi"}]).prompt


def test_fields_of_a_response_reach_the_replica():
    more = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": "x", "draft": False}
    call = called(max_output_tokens=7, **more)
    assert call.max_tokens == 7
    assert (call.stop, call.draft, call.n) == (("x",), False, 1)
    assert (call.parameters, call.seed) == ({"temperature": 0.5, "top_p": 0.9}, 3)
    assert (call.logprobs, called(**LOGPROBS).logprobs) == (None, 2)
    assert called(include=[*get_args(ResponseIncludable)]).logprobs == 0
    named = {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}
    for format_, schema in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (named, SCHEMA),
    ):
        request = called(text={"format": format_, "verbosity": "low"})
        guide = request.guide
        assert not request.unguided
        assert (guide and json.loads(guide.text)) == schema
        assert guide is None or guide.field == "text.format"
    guide = called(structured_outputs={"choice": ["a", "b"]}).guide
    assert guide == GuideSpec("choice", choices=("a", "b"))


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("more", "field", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": {"id": "c"}}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "not supported"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content", "input_image"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.type", "message"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "user"),
        ({"input": []}, "input", "1"),
        ({"input": 5}, "input", "list"),
        ({"input": None}, "input", "list"),
        ({"n": 2}, "n", "unknown"),
        ({"include": ["message.output_text.logprob"]}, "include.0", "logprobs"),
        ({"max_output_token": 5}, "max_output_token", "max_output_tokens"),
        ({"max_output_tokens": 513}, "max_output_tokens", "512"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "req"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "one"),
        ({"input": "x" * 300_000}, "input", "bytes"),
        ({"instructions": "x" * 300_000}, "input", "bytes"),
    ],
)  # fmt: skip
def test_unsupported_value_is_refused_by_the_clients_field_name(more, field, word):
    backend = FakeBackend(*answer("yes"))
    error = error_of(asked(backend, **more), 400)
    assert error["param"] == field
    assert word in error["message"]
    assert "messages." not in error["message"]
    assert backend.calls == []


def test_refusal_of_messages_names_the_input():
    refusal = Refusal(
        "invalid", "messages.0.content has 9 tokens; a row holds 8", "messages.0.content"
    )
    error = error_of(asked(FakeBackend(refusal)), 400)
    assert (error["param"], error["message"]) == ("input", "input has 9 tokens; a row holds 8")
    assert error_of(asked(FakeBackend(Refusal("full", "no place"))), 503)["param"] is None


def test_failed_response_stream_ends_with_an_error_event():
    first, *_ = answer("Hel", "lo")
    refusal = Refusal("invalid", "messages.0.content broke", "messages.0.content")
    *_, delta, error = streamed(first, refusal)
    assert delta.delta == "Hel"
    assert (error.type, error.message, error.param) == ("error", "input broke", "input")
    assert error.error["message"] == "input broke", "by which OpenAI's client knows an error"
