"""Tests that n answers to one request are those of n calls, in order, or cancelled together."""

import asyncio
from collections import defaultdict

import pytest
from fake_backend import COMPLETIONS, FOREVER, GOOD, FakeBackend, Service, answer, error_of, events
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tasc_protocol import Output
from tasc_runtime.protocol import Refusal

BODIES = {path: body | {"n": 3} for path, body in GOOD.items()}
SCRIPTS = {0: answer("ze", "ro"), 1: answer("one", reason="length"), 2: answer("t", "w", "o")}
USAGE = {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
either_endpoint = pytest.mark.parametrize("path", BODIES)


def ask(backend, path, limits=None, **fields):
    return Service(backend, **(limits or {})).ask("POST", path, json=BODIES[path] | fields)


@either_endpoint
@pytest.mark.parametrize("usage", [False, True])
def test_streamed_choices_are_complete_and_end_once(path, usage):
    more = {"stream_options": {"include_usage": True}} if usage else {}
    found = events(ask(FakeBackend(by_choice=SCRIPTS), path, stream=True, **more))
    if usage:
        last = found.pop()
        assert (last["choices"], last["usage"], last["metrics"]) == ([], USAGE, None)
    texts, reasons, roles = defaultdict(str), defaultdict(list), defaultdict(list)
    for content in found:
        assert "metrics" not in content
        if path == "/v1/completions":
            (choice,) = Completion.model_validate(
                {**content, "choices": [{**content["choices"][0], "finish_reason": "stop"}]}
            ).choices
            texts[choice.index] += choice.text
        else:
            (choice,) = ChatCompletionChunk.model_validate(content).choices
            texts[choice.index] += choice.delta.content
            roles[choice.index].append(choice.delta.role)
        reasons[choice.index].append(content["choices"][0]["finish_reason"])
    assert dict(texts) == {0: "zero", 1: "one", 2: "two"}
    assert dict(reasons) == {0: [None, "stop"], 1: ["length"], 2: [None, None, "stop"]}
    assert all(r == ["assistant"] + [None] * (len(r) - 1) for r in roles.values())
    assert len({(e["id"], e["created"]) for e in found}) == 1


@either_endpoint
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Refusal("full", "no place"), 503),
        (Refusal("invalid", "no such token", "logit_bias"), 400),
        (RuntimeError("password is 1234"), 500),
    ],
    ids=["full", "invalid", "broken"],
)
def test_refused_choice_fails_the_request_and_cancels_the_other_choices(path, stream, fault, code):
    backend = FakeBackend(FOREVER, by_choice={1: [fault]})
    error = error_of(ask(backend, path, stream=stream), code)
    assert error["param"] == (fault.param if isinstance(fault, Refusal) else None)
    assert len(backend.calls) == 3


@either_endpoint
@pytest.mark.parametrize("stream", [False, True])
def test_no_choice_outlives_the_deadline(path, stream):
    backend = FakeBackend(*answer("x"), by_choice={1: [Output("id"), FOREVER]})
    response = ask(backend, path, {"request_timeout_s": 0.1}, stream=stream)
    if stream:
        assert events(response)[-1]["error"]["code"] == "timeout"
    else:
        error_of(response, 504)


PROMPTS = {"texts": ["a", "b"], "ids": [[1, 2], [3]]}
SIX = {i: answer(str(i), "!" * i) for i in range(6)}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_is_answered_n_times_and_counted_once(kind, stream):
    backend = FakeBackend(by_choice=SIX)
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = ask(backend, COMPLETIONS, prompt=PROMPTS[kind], seed=7, **more)
    texts = defaultdict(str)
    contents = events(response) if stream else [response.json()]
    for content in contents:
        for choice in content["choices"]:
            texts[choice["index"]] += choice["text"]
    assert dict(texts) == {i: str(i) + "!" * i for i in range(6)}
    usage = {"prompt_tokens": 10, "completion_tokens": 24, "total_tokens": 34}
    assert (contents[-1]["usage"], contents[-1]["metrics"]) == (usage, None)
    asked = [(call.prompt, call.prompt_index, call.choice_index) for call in backend.calls]
    first, second = (p if isinstance(p, str) else tuple(p) for p in PROMPTS[kind])
    assert asked == [*((first, 0, j) for j in range(3)), *((second, 1, j) for j in range(3))]
    assert {call.seed for call in backend.calls} == {7}
    assert len({call.id for call in backend.calls}) == 6
    assert {call.record_version for call in backend.calls} == {1}


def test_stream_begins_only_after_all_calls_are_admitted():
    pieces = answer("one", "two", "three")
    refusal = Refusal("invalid", "prompt.2 is too long", "prompt.2")

    class Slow(FakeBackend):
        async def stream(self, call):
            if call.prompt_index == 2:
                while sum(sent.values()) < 2 * len(pieces):
                    await asyncio.sleep(0)
            async for piece in super().stream(call):
                yield piece
                sent[call.prompt_index] += 1

    sent = defaultdict(int)
    backend = Slow(*pieces, by_choice={2: [refusal]})
    response = ask(backend, COMPLETIONS, prompt=["a", "b", "c"], n=1, stream=True)
    assert error_of(response, 400)["param"] == "prompt.2"
    sent.clear()
    backend.by_choice = {2: [Output("id"), *pieces]}
    found = events(ask(backend, COMPLETIONS, prompt=["a", "b", "c"], n=1, stream=True))
    assert len(found) == 9
    assert all(event["choices"][0]["text"] for event in found)
