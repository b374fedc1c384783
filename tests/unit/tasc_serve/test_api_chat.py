"""Tests conversations over HTTP: calls of replicas, reports of unused fields, and refusals."""

import json
from dataclasses import replace

import pytest
from fake_backend import CHAT, MESSAGE, STATUS, TASK, FakeBackend, Service, answer, error_of

from tasc_runtime.protocol import Refusal
from tasc_text import Conversation, Message

IGNORED = "x-tasc-ignored"
SYSTEM = {"role": "system", "content": "be brief"}
ANSWERED = {"role": "assistant", "content": "hello"}
TALK = [SYSTEM, MESSAGE, ANSWERED, {"role": "user", "content": [{"type": "text", "text": "bye"}]}]
TURNS = (
    Message("system", "be brief"), Message("user", "hi"), Message("assistant", "hello"),
    Message("user", "bye"),
)  # fmt: skip


def asked(backend, messages, **more):
    service = Service(backend)
    body = {"model": TASK, "messages": messages, **more}
    return service, service.ask("POST", CHAT, content=json.dumps(body))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_messages_that_are_not_in_the_prompt_are_named_and_counted(chat, stream):
    backend = FakeBackend(*answer("yes"), status=replace(STATUS, chat=chat))
    service, response = asked(backend, TALK, stream=stream)
    assert response.status_code == 200
    assert [call.prompt for call in backend.calls] == [Conversation(TURNS)]
    assert backend.calls[0].templated
    named = response.headers.get(IGNORED, "")
    assert [f"messages.{i}" in named for i in range(4)] == [not chat, not chat, not chat, False]
    count = service.registry.get_sample_value("tasc_ignored_messages_total", {"task": TASK})
    assert count == (None if chat else 3)


def test_fields_for_chat_templates_reach_the_replica():
    backend = FakeBackend(*answer("yes"), status=replace(STATUS, chat=True))
    kwargs = {"enable_thinking": False, "é": [1, None, {"a": "b"}]}
    _, response = asked(
        backend, [{**MESSAGE, "name": "ann"}], add_generation_prompt=False,
        chat_template_kwargs=kwargs, strict_messages=True,
    )  # fmt: skip
    assert response.status_code == 200
    (call,) = backend.calls
    assert call.prompt.messages == (Message("user", "hi", "ann"),)
    assert (call.prompt.strict, call.prompt.add_generation_prompt) == (True, False)
    assert json.loads(call.prompt.variables) == kwargs


@pytest.mark.parametrize(
    "more", [{"reasoning_effort": "high"}, {"reasoning": {"effort": "high", "summary": "auto"}}]
)
def test_reasoning_effort_reaches_the_replica(more):
    for path, asked in ((CHAT, {"messages": [MESSAGE]}), ("/v1/responses", {"input": "hi"})):
        backend = FakeBackend(*answer("yes"))
        response = Service(backend).ask("POST", path, json={"model": TASK, **asked, **more})
        assert response.status_code == 200, response.text
        want = Conversation((Message("user", "hi"),), reasoning_effort="high")
        assert [call.prompt for call in backend.calls] == [want]
        assert IGNORED not in response.headers


def test_refusal_of_a_replica_is_a_client_error():
    refusal = Refusal("invalid", "messages.0 is not used", "messages.0")
    service, response = asked(FakeBackend(refusal), TALK, strict_messages=True)
    assert error_of(response, 400)["param"] == "messages.0"
    assert service.registry.get_sample_value("tasc_ignored_messages_total", {"task": TASK}) is None


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("messages", "more", "field", "word"),
    [
        ([MESSAGE, {"role": "tool", "tool_call_id": "1", "content": "a"}], {}, ".1.role", "user"),
        ([{"role": "function", "name": "f", "content": "a"}], {}, ".0.role", "user"),
        ([MESSAGE, {"role": "critic", "content": "a"}], {}, ".1.role", "assistant"),
        (["hi"], {}, ".0", "object"),
        ([{"role": "user"}], {}, ".0.content", "content"),
        ([{**MESSAGE, "content": [{"text": "hi"}]}], {}, ".0.content", "type"),
        ([{**MESSAGE, "content": [1]}], {}, ".0.content", "list"),
        ([{**MESSAGE, "content": "x" * (1 << 20)}], {}, ".0.content", "bytes"),
        ([{**MESSAGE, "content": [IMAGE]}], {}, ".0.content", "image_url"),
        ([MESSAGE, {**ANSWERED, "content": None}], {}, ".1.content", "text"),
        ([{**ANSWERED, "tool_calls": [{"id": "1"}]}], {}, ".0.tool_calls", "not supported"),
        ([{**ANSWERED, "refusal": "no"}], {}, ".0.refusal", "not supported"),
        ([MESSAGE] * 4097, {}, "", "4096"),
        ([SYSTEM, {**MESSAGE, "content": "x" * 300_000}], {}, "", "bytes"),
        ([MESSAGE], {"chat_template_kwargs": {"a": float("nan")}}, "chat_template_kwargs", "JSON"),
        ([MESSAGE], {"chat_template_kwargs": {"a": "x" * 300_000}}, "", "bytes"),
        ([MESSAGE], {"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
        ([MESSAGE], {"add_generation_prompt": "no"}, "add_generation_prompt", "bool"),
        ([MESSAGE], {"strict_messages": 1}, "strict_messages", "bool"),
    ],
)
def test_message_that_no_template_accepts_is_refused_and_named(messages, more, field, word):
    backend = FakeBackend(*answer("yes"))
    error = error_of(asked(backend, messages, **more)[1], 400)
    assert error["param"] == (field if field and field[0] != "." else f"messages{field}")
    assert word in error["message"]
    assert backend.calls == []


def test_answer_fields_that_clients_send_back_are_accepted():
    sent_back = {
        **ANSWERED, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": [], "provider_specific_fields": None, "reasoning_content": "because",
        "id": "m1", "index": 0, "logprobs": None, "thinking_blocks": [], "whatever": None,
        "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"},
                     "citations": None, "whatever": None}],
    }  # fmt: skip
    backend = FakeBackend(*answer("yes"))
    both = {"max_tokens": 5, "max_completion_tokens": 5}
    assert asked(backend, [MESSAGE, sent_back, MESSAGE], **both)[1].status_code == 200
    assert backend.calls[0].prompt.messages[1] == Message("assistant", "hello")
