"""Tests that every field of known clients is used, harmless, or refused by name."""

from typing import Any, get_type_hints

import pytest
from fake_backend import CHAT, COMPLETIONS, GOOD, RESPONSES, FakeBackend, Service, answer, error_of
from msgspec import structs
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from tasc_serve.http.responses_api import ResponsesRequest
from tasc_serve.http.schemas import ChatRequest, CompletionRequest, HarmlessFields

CLIENTS: dict[str, tuple[type[HarmlessFields], tuple[type, ...]]] = {
    COMPLETIONS: (
        CompletionRequest,
        (
            completion_params.CompletionCreateParamsNonStreaming,
            completion_params.CompletionCreateParamsStreaming,
        ),
    ),
    CHAT: (
        ChatRequest,
        (
            chat_params.CompletionCreateParamsNonStreaming,
            chat_params.CompletionCreateParamsStreaming,
        ),
    ),
    RESPONSES: (
        ResponsesRequest,
        (
            responses_params.ResponseCreateParamsNonStreaming,
            responses_params.ResponseCreateParamsStreaming,
        ),
    ),
}
BODIES = GOOD | {RESPONSES: {"model": "greet", "input": "hi"}}
HARMLESS: dict[str, Any] = {
    "user": "u1",
    "store": True,
    "metadata": {"ticket": "7"},
    "service_tier": "auto",
    "safety_identifier": "u1",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "parallel_tool_calls": False,
    "max_tool_calls": 1,
    "verbosity": "low",
    "prediction": {"type": "content", "content": "hello"},
    "access_programs": {"cyber": "standard"},
    "priority": 0,
    "request_id": "r1",
    "guided_decoding_backend": "auto",
}
every_path = pytest.mark.parametrize("path", CLIENTS)


@every_path
def test_every_field_of_the_openai_client_is_used_harmless_or_unsupported(path):
    model, params = CLIENTS[path]
    sent = {name for one in params for name in get_type_hints(one)}
    assert len(sent) > 15
    assert sent - {*model.model_fields} - {*model.unsupported} == set()
    assert {*model.model_fields} & {*model.unsupported} == set()


@every_path
def test_harmless_fields_change_nothing(path):
    assert {*HARMLESS} == {*HarmlessFields.model_fields}
    backend = FakeBackend(*answer("Hello"))
    service = Service(backend)
    plain, laden = (
        service.ask("POST", path, json=BODIES[path] | {"seed": 1} | more).json()
        for more in ({}, HARMLESS)
    )
    changing = {"id": "", "created": 0, "created_at": 0, "output": []}
    assert plain | changing == laden | changing
    one, other = backend.calls
    assert structs.replace(one, id=other.id) == other


@every_path
def test_unsupported_fields_are_refused_unless_their_value_is_neutral(path):
    model, _ = CLIENTS[path]
    service = Service(FakeBackend(*answer("Hello")))
    assert service.ask("POST", path, json=BODIES[path] | {"qwertyuiop": None}).status_code == 200
    for name, neutral in model.unsupported.items():
        for value in (*neutral, None):
            response = service.ask("POST", path, json=BODIES[path] | {name: value})
            assert response.status_code == 200, response.text
        error = error_of(service.ask("POST", path, json=BODIES[path] | {name: {"a": 1}}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


@every_path
@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("temprature", "temperature"),
        ("max_tokes", "_tokens"),
        ("top-p", "top_p"),
        ("guided_choices", "guided_choice"),
        ("qwertyuiop", None),
    ],
)
def test_misspelt_field_is_refused_with_the_nearest_name(path, misspelt, meant):
    service = Service(FakeBackend())
    error = error_of(service.ask("POST", path, json=BODIES[path] | {misspelt: 1}), 400)
    assert (error["param"], error["code"]) == (misspelt, "unknown_parameter")
    assert meant is None or meant in error["message"]
