"""Tests that all bad requests get a response in OpenAI's format that names the fault."""

import asyncio
import gzip
import json
import threading

import pytest
from fake_backend import (
    CHAT,
    COMPLETIONS,
    FOREVER,
    GOOD,
    MESSAGE,
    STATUS,
    TASK,
    FakeBackend,
    Service,
    answer,
    error_of,
)

from tasc_runtime.protocol import Refusal
from tasc_serve.http.schemas import ChatRequest

MEGABYTE = "x" * (1 << 20)
SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
NAMED = {"name": "it", "schema": SCHEMA}
JSON_SCHEMA = {"type": "json_schema", "json_schema": NAMED}
NEUTRAL = {"temperature": 0, "top_p": 1, "n": 1, "user": "someone", "stop": ["\n", "."]}

# Values that a field cannot have; the answer must name the field.
NAN = float("nan")
BOOLEANS = ("store", "stream", "draft", "ignore_eos", "add_special_tokens")
BAD_VALUES = {
    **{name: [1, "yes"] for name in (*BOOLEANS, "include_stop_str_in_output")},
    **{name: [""] for name in ("guided_regex", "guided_grammar")},
    **{name: ["x" * 257] for name in ("user", "service_tier")},
    "best_of": [2, 0],
    "str": [1],
    "metadata": ["a", {str(i): "" for i in range(17)}],
    "prediction": [{str(i): 0 for i in range(17)}],
    "model": [None, 3],
    "max_tokens": [0, -1, 513, 10**30, "5", 5.0, True],
    "temperature": [-0.1, 2.1, NAN, "1"],
    "seed": [2**63, 0.5],
    "n": [0, 17],
    "logit_bias": [{str(i): "1" for i in range(1025)}, [[5, 1]]],
    "response_format": [{}, {"type": "yaml"}],
    "guided_choice": [[], "yes"],
    "guided_json": ["", "{", "[1]", "a schema", {"maximum": NAN}],
    "structured_outputs": [[], "a", "{}", {}, {"disable_fallback": True, "json_object": False}],
    "stop_token_ids": [5, [1] * 65, {}],
    "min_tokens": [-1, 1.5, 2**31],
    "truncate_prompt_tokens": [-2, 2**31],
    "metrics": ["all"],
    "stop": ["", 5, ["x"] * 17, "caf\N{REPLACEMENT CHARACTER}", "\ud83d", ["x", "\ude42"]],
}
SPACED = {"json": {}, "whitespace_pattern": " "}
# Faults of the body, and the place or the second field that the response must name.
BAD_PLACES = [
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"01": 1}}, "logit_bias.01"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    *(({"logit_bias": {"5": bad}}, "logit_bias.5") for bad in (101, NAN, "1")),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_choice": ["yes", 1]}, "guided_choice.1"),
    ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_regex"),
    ({"response_format": JSON_SCHEMA, "guided_json": SCHEMA}, "guided_json"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ({"guided_choice": ["a"], "min_tokens": 1}, "min_tokens"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids.1"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choise": ["a"]}}, "structured_outputs.choise"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs.regex"),
    ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ({"guided_choice": ["a"], "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    (
        {"structured_outputs": {**SPACED, "disable_any_whitespace": 1}},
        "structured_outputs.disable_any_whitespace",
    ),
    (
        {"structured_outputs": SPACED, "guided_whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["x", "\N{REPLACEMENT CHARACTER}"]}, "stop.1"),
    ({"stream_options": {"obfuscate": True}}, "stream_options.obfuscate"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]
BAD_COMPLETIONS = {
    "messages": [[MESSAGE]],
    "prompt": [None, 5, [], {"text": "hi"}, MEGABYTE, ["hi"] * 257],
    "logprobs": [21, -1, True],
    "top_logprobs": [1],
}
BAD_PROMPTS = [
    *(([3, -1], 1), ([2**31], 0), ([1.5], 0), ([True], 0), ([None], 0), ([{}], 0)),
    *((["one", 2], 1), (["one", [2]], 1), ([1, "two"], 1), ([1, [2]], 1), ([[1], 2], 1)),
    *(([[1], "two"], 1), ([[1], []], 1), ([[1], [2, -1]], "1.1"), (["hi", MEGABYTE], 1)),
]
BAD_CHATS = {
    "echo": [True],
    "messages": [None, []],
    "max_completion_tokens": [0, 513],
    "logprobs": [1],
    "top_logprobs": [1],
}


def each(table):
    return [({field: value}, field) for field, values in table.items() for value in values]


BAD_FIELDS = [
    *((path, *case) for path in GOOD for case in (*each(BAD_VALUES), *BAD_PLACES)),
    *((COMPLETIONS, *case) for case in each(BAD_COMPLETIONS)),
    *((COMPLETIONS, {"prompt": prompt}, f"prompt.{at}") for prompt, at in BAD_PROMPTS),
    *((CHAT, *case) for case in each(BAD_CHATS)),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
    (COMPLETIONS, {"": 1}, '""'),
]


def named(case):
    return str(case)[:60]


@pytest.fixture
def backend():
    return FakeBackend(*answer("Hel", "lo"))


@pytest.fixture
def service(backend):
    return Service(backend)


@pytest.fixture(scope="module")
def unheard():
    """A service that no request may pass, so one is enough for all tests."""
    backend = FakeBackend(*answer("Hel", "lo"))
    yield Service(backend)
    assert backend.calls == []


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("more", [{}, NEUTRAL, {"max_tokens": 512}, {"stop": []}])
def test_valid_request_gets_the_whole_answer(backend, service, path, more):
    response = service.ask("POST", path, json=GOOD[path] | more)
    assert response.status_code == 200, response.text
    content = response.json()
    assert content["model"] == TASK
    assert content["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (choice,) = content["choices"]
    assert choice["finish_reason"] == "stop"
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert text == "Hello"
    (call,) = backend.calls
    assert (call.prompt, call.templated) == ("hi", path == CHAT)
    assert (call.max_tokens, list(call.stop)) == (more.get("max_tokens"), more.get("stop", []))
    assert service.counted(TASK, 200) == 1


@pytest.mark.parametrize(("path", "change", "field"), BAD_FIELDS, ids=named)
def test_invalid_field_is_refused_and_named_and_reaches_no_replica(unheard, path, change, field):
    response = unheard.ask("POST", path, content=json.dumps(GOOD[path] | change))
    error = error_of(response, 400)
    assert error["param"] == field
    assert field in error["message"]
    assert "Value error" not in error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_request_without_a_model_is_refused_by_field_name(service, path):
    body = {k: v for k, v in GOOD[path].items() if k != "model"}
    assert error_of(service.ask("POST", path, json=body), 400)["param"] == "model"


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b'{"model": "greet",}', b'{"prompt": "\xff\xfe"}', b'["\\ud800"]'),
        *(b"[" * 100_000, b"[]", b'"hi"', b"3", b"null", b'{"": "\\ud800", "n":' + b"[" * 100_000),
    ],
    ids=named,
)
def test_body_that_is_not_a_json_object_is_refused(backend, service, path, body):
    error = error_of(service.ask("POST", path, content=body), 400)
    assert error["message"].startswith(("the body is not valid JSON", "body: "))
    assert (error["param"], backend.calls) == (None, [])
    assert service.counted("-", 400) == 1


@pytest.mark.parametrize("path", GOOD)
def test_model_that_is_not_served_is_not_found(service, path):
    error = error_of(service.ask("POST", path, json=GOOD[path] | {"model": "other"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'other'" in error["message"]
    assert TASK in error["message"]
    assert service.counted("-", 404) == 1, "a made-up name must not become a label"


def test_body_over_the_limit_is_not_read_completely(backend):
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 1
            yield b"x" * 100

    service = Service(backend, max_body_bytes=1000)
    error = error_of(service.ask("POST", COMPLETIONS, content=endless()), 413)
    assert "1000 bytes" in error["message"]
    assert read == 11


def test_compressed_body_is_read_up_to_the_same_limit(backend):
    service, gzipped = Service(backend, max_body_bytes=1000), {"Content-Encoding": "gzip"}
    good = json.dumps({"model": TASK, "prompt": "x" * 900}).encode()
    name = "Content-Encoding"
    for packed, headers in [
        (True, gzipped),
        (True, {name: "x-gzip"}),
        (True, [(name, "gzip"), (name, "identity")]),  # the first of several headers counts
        (False, [(name, "identity"), (name, "gzip")]),
        (False, {name: ""}),
    ]:
        content = gzip.compress(good) if packed else good
        found = service.ask("POST", COMPLETIONS, content=content, headers=headers)
        assert found.status_code == 200
    for content, headers, status in [
        (gzip.compress(good + b" " * 10**6), gzipped, 413),
        (good, gzipped, 400),
        (gzip.compress(good)[:-9], gzipped, 400),
        (gzip.compress(good) * 2, gzipped, 400),
        (good, {"Content-Encoding": "br"}, 415),
    ]:
        error_of(service.ask("POST", COMPLETIONS, content=content, headers=headers), status)
    assert [call.prompt for call in backend.calls] == ["x" * 900] * 5


def test_options_and_head_are_answered_without_a_body(backend):
    service = Service(backend)
    for path, methods in ((COMPLETIONS, "POST"), ("/healthz", "GET, HEAD")):
        response = service.ask("OPTIONS", path)
        assert (response.status_code, response.headers["Allow"], response.content) == (
            204,
            methods,
            b"",
        )
    found, head = (service.ask(method, "/v1/models") for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == str(len(found.content))
    error_of(service.ask("OPTIONS", "/v1/nothing"), 404)
    assert service.ask("HEAD", COMPLETIONS).status_code == 405


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    ("outcome", "status", "code", "param", "message"),
    [
        (Refusal("full", "12 requests"), 503, "service_full", None, "12 requests"),
        (Refusal("invalid", "prompt is too long", "prompt"), 400, None, "prompt", "too long"),
        (FOREVER, 504, "timeout", None, "0.05 s"),
        (RuntimeError("password is 1234"), 500, None, None, "internal error"),
    ],
    ids=["full", "invalid", "timeout", "unexpected"],
)
def test_failure_before_the_first_piece_is_an_error_response(
    path, stream, outcome, status, code, param, message
):
    service = Service(FakeBackend(outcome, FOREVER), request_timeout_s=0.05)
    response = service.ask("POST", path, json=GOOD[path] | {"stream": stream})
    error = error_of(response, status)
    assert (error["code"], error["param"]) == (code, param)
    assert message in error["message"]
    assert "1234" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)
    assert service.counted(TASK, status) == 1


def test_unknown_path_is_not_found_and_a_wrong_method_is_refused(service):
    assert "/v1/nothing" in error_of(service.ask("GET", "/v1/nothing"), 404)["message"]
    for method, path, allowed in (("GET", CHAT, "POST"), ("DELETE", "/v1/models", "GET, HEAD")):
        response = service.ask(method, path)
        assert path in error_of(response, 405)["message"]
        assert response.headers["allow"] == allowed


def test_models_and_tasks_are_listed(service):
    (model,) = service.ask("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"]) == (TASK, "model")
    assert service.ask("GET", f"/v1/models/{TASK}").json() == model
    assert error_of(service.ask("GET", "/v1/models/other"), 404)["code"] == "model_not_found"
    (task,) = service.ask("GET", "/v1/tasks").json()["data"]
    assert (task["task"], task["index_version"]) == (TASK, STATUS.index_version)


def test_service_is_ready_once_a_task_has_a_replica(service):
    assert service.ask("GET", "/readyz").json() == {"status": "ready", "tasks": [TASK]}
    starting = FakeBackend(status=None)
    starting.settles_to = STATUS
    assert Service(starting).ask("GET", "/readyz").json()["tasks"] == [TASK]
    away = Service(FakeBackend(status=None))
    response = away.ask("GET", "/readyz")
    assert "no task has a replica" in error_of(response, 503)["message"]
    assert "retry-after" in response.headers
    assert away.ask("GET", "/healthz").json() == {"status": "ok"}


def test_metrics_include_all_processes_and_sd_lists_all_processes(service):
    service.ask("GET", "/v1/nothing")
    service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    lines = service.ask("GET", "/metrics").text.splitlines()
    assert "held 3.0" in lines
    assert 'tasc_http_requests_total{code="200",task="greet"} 1.0' in lines
    (group,) = service.ask("GET", "/sd").json()
    assert group == {"targets": ["127.0.0.1:1", "127.0.0.1:2"], "labels": {}}


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


def test_long_field_name_is_truncated_in_the_error():
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
def test_oversized_prompt_or_list_is_refused_with_the_limit(change, field, limits):
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
def test_oversized_guide_is_refused_with_the_limit(change, limit):
    param, message = refused(COMPLETIONS, change, max_choices=1)
    assert (param, f"at most {limit} are" in message) == (next(iter(change)), True)


def test_null_field_gets_the_default_value():
    null = dict.fromkeys(("stream", "draft", "ignore_eos", "metrics", "n"))
    call, content = call_of(COMPLETIONS, null)
    assert (call.stream, call.draft, call.ignore_eos, call.n) == (False, True, False, 1)
    assert content["metrics"]["draft_index_version"] == 7


def test_text_parts_are_joined_even_in_a_large_body():
    parts = [{"type": "text", "text": text} for text in ("a", "é" * 40_000, "b")]
    call, _ = call_of(CHAT, {"messages": [MESSAGE | {"content": parts}]})
    assert call.prompt == "a" + "é" * 40_000 + "b"


def test_large_conversation_is_parsed_once_and_off_the_event_loop(monkeypatch):
    made, threads = ChatRequest.conversation_of, []

    def noted(*asked):
        threads.append(threading.current_thread())
        return made(*asked)

    monkeypatch.setattr(ChatRequest, "conversation_of", noted)
    call_of(CHAT, {"messages": [MESSAGE | {"content": "a" * 100_000}]})
    assert [thread is threading.main_thread() for thread in threads] == [False]


def test_service_without_its_store_is_degraded_but_ready():
    away = Service(FakeBackend(store_fault="no Redis answers at redis://host"))
    found = away.ask("GET", "/readyz")
    assert found.status_code == 200
    assert found.json()["status"] == "degraded"
    assert "no Redis" in found.json()["store"]


def test_drained_gateway_finishes_its_requests_and_refuses_new_requests(service):
    answered = service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    assert answered.status_code == 200
    service.in_flight.enter()
    assert asyncio.run(service.in_flight.drain(0.05)) == 1
    service.in_flight.leave()
    assert asyncio.run(service.in_flight.drain(0.05)) == 0
    response = service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS])
    error_of(response, 503)
    assert response.headers["connection"] == "close"
    error_of(service.ask("GET", "/readyz"), 503)


def test_request_can_shorten_but_not_extend_the_timeout():
    backend = FakeBackend(FOREVER)
    service = Service(backend, request_timeout_s=0.05)
    for timeout in (0.01, 1000):
        error = error_of(
            service.ask("POST", COMPLETIONS, json=GOOD[COMPLETIONS] | {"timeout": timeout}), 504
        )
        assert f"{min(timeout, 0.05)} s" in error["message"]
    assert [call.timeout_s for call in backend.calls] == [0.01, 0.05]


ORIGIN = "https://example.org"


def called(origins, method, path, body=None, **headers):
    """Returns the response of a service that pages of some origins may call."""
    service = Service(FakeBackend(*answer("yes")), cors_origins=origins)
    sent = {"content": json.dumps(body)} if "content-type" in headers else {"json": body}
    return service.ask(method, path, headers={"Origin": ORIGIN, **headers}, **sent)


ASKING = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("*",), "*"), ((ORIGIN,), ORIGIN), (("https://other.org",), None)],
)
def test_only_scripts_from_configured_origins_may_call_the_api(origins, allowed):
    for path, body in GOOD.items():
        for more, status in (({}, 200), ({"stream": True}, 200), ({"stop": 5}, 400)):
            response = called(origins, "POST", path, body | more)
            assert (response.status_code, response.headers.get(ALLOWED)) == (status, allowed)
    assert called(origins, "GET", "/v1/models").headers.get(ALLOWED) == allowed
    first = called(origins, "OPTIONS", CHAT, **ASKING)
    assert first.headers.get(ALLOWED) == allowed
    if allowed:
        assert first.status_code == 200
        assert first.headers["access-control-allow-headers"] == "authorization,content-type"
        assert response.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_content_types_that_need_no_preflight_are_refused(kind):
    for path, body in GOOD.items():
        error_of(called((), "POST", path, body, **{"content-type": kind}), 415)
        json_too = {"content-type": "application/json; charset=utf-8"}
        assert called((), "POST", path, body, **json_too).status_code == 200
