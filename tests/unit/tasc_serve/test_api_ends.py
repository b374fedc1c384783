"""What is wrong with a body is said in words of bounded length. How requests and gateways end."""

import asyncio
import json
import threading

import pytest
from fake_backend import (
    CHAT,
    COMPLETIONS,
    FOREVER,
    GOOD,
    MESSAGE,
    TASK,
    FakeBackend,
    Service,
    answer,
    error_of,
)

from tasc_runtime.protocol import Refusal
from tasc_serve.http.schemas import ChatRequest

MANY = {f"x{i}": i for i in range(20_000)}


def refused(path, change, **limits):
    backend = FakeBackend(*answer("yes"))
    content = change if isinstance(change, bytes) else json.dumps(GOOD[path] | change)
    error = error_of(Service(backend, **limits).ask("POST", path, content=content), 400)
    assert backend.calls == []
    return error["param"], error["message"]


def call_of(path, change):
    backend = FakeBackend(*answer("yes"))
    response = Service(backend).ask("POST", path, json=GOOD[path] | change)
    assert response.status_code == 200, response.text
    (call,) = backend.calls
    return call, response.json()


@pytest.mark.parametrize(
    ("path", "change", "field", "words"),
    [
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1", "is not a string"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.1", "is not a token id"),
        (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt.1", "is not a list of token ids"),
        (COMPLETIONS, {"prompt": [[1], [2, "a"]]}, "prompt.1.1", "is not a token id"),
        (COMPLETIONS, {"prompt": 5}, "prompt", "a string, a list of token ids"),
        (COMPLETIONS, {"logit_bias": {"a": 1}}, "logit_bias.a", "keys are token ids"),
        (COMPLETIONS, {"guided_choice": []}, "guided_choice", "guided_choice is empty"),
        (COMPLETIONS, {"temprature": 1}, "temprature", "did you mean temperature?"),
        (COMPLETIONS, {"zzz": False}, "zzz", "unknown field zzz"),
        (COMPLETIONS, {"": 1}, '""', 'unknown field ""'),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "one limit"),
        (CHAT, {"messages": [MESSAGE | {"content": [1]}]}, "messages.0.content", "list of at most"),
    ],
)
def test_a_fault_is_said_in_words(path, change, field, words):
    param, message = refused(path, change)
    assert param == field
    assert words in message
    assert "Value error" not in message


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"\\ud800":"\\ud800"}', "'\\ud800'"),
        (b'{"\\ud800":1}', "'\\ud800'"),
        (b'{"":"\\ud800"}', '""'),
    ],
)
def test_a_field_with_half_of_a_character_in_its_name_is_named(path, body, name):
    param, message = refused(path, body)
    assert (param, "half of a character" in message) == (name, True)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("change", "prefix"),
    [
        (MANY, ""),
        ({"stream_options": MANY}, "stream_options."),
        (
            {"response_format": {"type": "json_schema", "json_schema": MANY}},
            "response_format.json_schema.",
        ),
    ],
    ids=["body", "stream_options", "json_schema"],
)
def test_of_many_unknown_fields_the_first_is_named(path, change, prefix):
    param, message = refused(path, change)
    assert param == f"{prefix}x0"
    assert len(message) < 100


def test_a_long_name_is_cut():
    param, message = refused(COMPLETIONS, {"x" * 1000: 1})
    assert param == "x" * 64
    assert len(message) < 150


@pytest.mark.parametrize(
    ("change", "field", "limits"),
    [
        ({"prompt": [1] * 4}, "prompt", {"max_prompt_bytes": 12}),
        ({"prompt": [[1], [1] * 4]}, "prompt.1", {"max_prompt_bytes": 12}),
        ({"prompt": ["a", "b", "éé"]}, "prompt.2", {"max_prompt_bytes": 3}),
        ({"prompt": ["a"] * 4}, "prompt", {"max_prompts": 3}),
        ({"prompt": ["a"] * 2, "n": 4}, "n", {"max_prompts": 7}),
        ({"prompt": ["a"] * 2, "n": 2}, "n", {"max_prompt_bytes": 1, "max_choices": 3}),
    ],
)
def test_what_is_too_large_is_refused_with_the_limit(change, field, limits):
    param, message = refused(COMPLETIONS, change, **limits)
    assert (param, "at most 3 are taken" in message) == (field, True)


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"guided_choice": ["a"] * 20_001}, 20_000),
        ({"guided_choice": ["a" * 1_000_001] * 2}, 2_000_000),
        ({"guided_regex": "é" * 32_769}, 65_536),
        ({"guided_json": {"a": "x" * 65_536}}, 65_536),
        ({"guided_grammar": "x" * 65_537}, 65_536),
        ({"guided_choice": ["a" * 1_000_001], "prompt": ["a"] * 2}, 1_000_000),  # for each of them
    ],
)
def test_a_guide_that_is_too_large_is_refused_with_the_limit(change, limit):
    param, message = refused(COMPLETIONS, change, max_choices=1)
    assert (param, f"at most {limit} are" in message) == (next(iter(change)), True)


def test_null_means_the_default():
    null = dict.fromkeys(("stream", "draft", "ignore_eos", "metrics", "n"))
    call, content = call_of(COMPLETIONS, null)
    assert (call.stream, call.draft, call.options.ignore_eos, call.n) == (False, True, False, 1)
    assert content["metrics"]["draft_index_version"] == 7


def test_parts_of_text_are_one_text_also_in_a_large_body():
    parts = [{"type": "text", "text": text} for text in ("a", "é" * 40_000, "b")]
    call, _ = call_of(CHAT, {"messages": [MESSAGE | {"content": parts}]})
    assert call.prompt == "a" + "é" * 40_000 + "b"


def test_a_large_conversation_is_made_once_and_not_on_the_event_loop(monkeypatch):
    made, threads = ChatRequest.conversation_of, []

    def noted(*asked):
        threads.append(threading.current_thread())
        return made(*asked)

    monkeypatch.setattr(ChatRequest, "conversation_of", noted)
    call_of(CHAT, {"messages": [MESSAGE | {"content": "a" * 100_000}]})
    assert [thread is threading.main_thread() for thread in threads] == [False]


def test_a_model_is_found_by_its_name():
    service = Service(FakeBackend())
    assert service.ask("GET", f"/v1/models/{TASK}").json()["id"] == TASK
    assert error_of(service.ask("GET", "/v1/models/other"), 404)["code"] == "model_not_found"


@pytest.fixture
def service() -> Service:
    return Service(FakeBackend(*answer("Good ", "day")))


def test_without_its_store_the_service_is_degraded_and_still_ready():
    away = Service(FakeBackend(store_fault="no Redis answers at redis://host"))
    found = away.ask("GET", "/readyz")
    assert found.status_code == 200
    assert found.json()["status"] == "degraded"
    assert "no Redis" in found.json()["store"]


def test_a_gateway_that_is_drained_takes_nothing_new_and_ends_what_it_has(service):
    answered = service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    assert (answered.status_code, service.in_flight.inside) == (200, 0)
    service.in_flight.enter()
    assert asyncio.run(service.in_flight.drain(0.05)) == 1
    service.in_flight.leave()
    assert asyncio.run(service.in_flight.drain(0.05)) == 0
    response = service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    error_of(response, 503)
    assert response.headers["connection"] == "close"
    error_of(service.ask("GET", "/readyz"), 503)
    assert service.in_flight.inside == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [answer("Good ", "day"), [RuntimeError("no")], [FOREVER]])
def test_whoever_came_in_is_out_again_whatever_became_of_the_answer(stream, script):
    service = Service(FakeBackend(*script), request_timeout_s=0.05)
    service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS] | {"stream": stream})
    assert service.in_flight.inside == 0


def test_a_request_may_set_a_shorter_timeout_and_no_longer_one():
    backend = FakeBackend(FOREVER)
    service = Service(backend, request_timeout_s=0.05)
    for timeout in (0.01, 1000):
        error = error_of(
            service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS] | {"timeout": timeout}), 504
        )
        assert f"{min(timeout, 0.05)} s" in error["message"]
    assert [call.timeout_s for call in backend.calls] == [0.01, 0.05]


def test_a_full_service_says_when_to_come_again():
    backend = FakeBackend(Refusal("full", "no place", None, 11.2))
    response = Service(backend).ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    error_of(response, 503)
    assert response.headers["retry-after"] == "12"
