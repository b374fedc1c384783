"""Several answers to one request are those of as many calls: in order, or given up together."""

import asyncio
from collections import defaultdict

import pytest
from fake_backend import FOREVER, GOOD, TASK, FakeBackend, Service, answer, error_of, events
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tasc_runtime.protocol import Call, Refusal
from tasc_serve.routing import choices

BODIES = {path: body | {"n": 3} for path, body in GOOD.items()}
SCRIPTS = {0: answer("ze", "ro"), 1: answer("one", reason="length"), 2: answer("t", "w", "o")}
USAGE = {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
either_endpoint = pytest.mark.parametrize("path", BODIES)


def ask(backend, path, limits=None, **fields):
    return Service(backend, **(limits or {})).ask("POST", path, json=BODIES[path] | fields)


@either_endpoint
def test_the_choices_are_whole_in_their_order_and_the_prompt_counts_once(path):
    backend = FakeBackend(by_choice=SCRIPTS)
    content = ask(backend, path, logprobs=None).json()
    parsed = (Completion if path == "/v1/completions" else ChatCompletion).model_validate(content)
    found = [
        (c.index, c.text if path == "/v1/completions" else c.message.content, c.finish_reason)
        for c in parsed.choices
    ]
    assert found == [(0, "zero", "stop"), (1, "one", "length"), (2, "two", "stop")]
    assert content["usage"] == USAGE
    assert content["metrics"] is None
    ids = {call.id for call in backend.calls}
    stem = content["id"].split("-", 1)[1]
    assert ids == {f"{stem}-c{i}" for i in range(3)}


@either_endpoint
@pytest.mark.parametrize("usage", [False, True])
def test_streamed_choices_are_each_whole_and_end_once(path, usage):
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
def test_one_that_is_refused_is_the_answer_and_the_others_are_given_up(path, stream, fault, code):
    backend = FakeBackend(FOREVER, by_choice={1: [fault]})
    error = error_of(ask(backend, path, stream=stream), code)
    assert error["param"] == (fault.param if isinstance(fault, Refusal) else None)
    assert (len(backend.calls), backend.open) == (3, 0)


@either_endpoint
def test_one_that_fails_later_ends_the_stream_of_all(path):
    late = Refusal("failed", "out of memory")
    backend = FakeBackend(*answer("one", "two")[:1], FOREVER, by_choice={2: [late]})
    backend.by_choice = {2: [*answer("one", "two")[:1], late]}
    *pieces, last = events(ask(backend, path, stream=True))
    assert last["error"]["code"] == "answer_failed"
    assert 0 < len(pieces) <= 3
    assert backend.open == 0


@either_endpoint
@pytest.mark.parametrize("stream", [False, True])
def test_none_outlives_the_deadline(path, stream):
    backend = FakeBackend(*answer("x"), by_choice={1: [FOREVER]})
    response = ask(backend, path, {"request_timeout_s": 0.1}, stream=stream)
    if stream:
        assert events(response)[-1]["error"]["code"] == "timeout"
    else:
        error_of(response, 504)
    assert backend.open == 0


@either_endpoint
def test_how_many_answers_there_may_be_is_limited(path):
    limits, backend = {"max_choices": 4}, FakeBackend(*answer("x"))
    assert ask(backend, path, limits, n=4).status_code == 200
    assert error_of(ask(backend, path, limits, n=5), 400)["param"] == "n"


def test_who_no_longer_waits_gives_up_all_of_them():
    backend = FakeBackend(FOREVER, by_choice={1: answer("x")})

    async def go_away():
        waiting = asyncio.create_task(choices.complete(backend, TASK, Call("id", "hi", True, n=3)))
        while len(backend.calls) < 3:
            await asyncio.sleep(0)
        assert backend.open == 2
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return backend.open

    assert asyncio.run(go_away()) == 0
