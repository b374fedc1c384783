"""Tests log-probabilities in OpenAI's formats, each token once, and summaries of requests."""

import json
import math

import fake_backend
import pytest
from fake_backend import COMPLETIONS, GOOD, FakeBackend, Service, answer, events
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tasc_engine import Acceptance, GenerationResult, Timings
from tasc_protocol import TokenText
from tasc_serve.http.responses import chat_logprobs, completion_logprobs, metrics_of

COMPLETION = (COMPLETIONS, GOOD[COMPLETIONS] | {"logprobs": 2})
CHAT = (fake_backend.CHAT, GOOD[fake_backend.CHAT] | {"logprobs": True, "top_logprobs": 2})
TEXTS = ("naïve", "", "東京 🙂")
TOKENS = ["na", "ïve", "", "", "東京", " 🙂"]
OFFSETS = [0, 2, 5, 5, 5, 7]


def ask(asked, pieces, **more):
    path, body = asked
    response = Service(FakeBackend(*pieces)).ask("POST", path, json=body | more)
    assert response.status_code == 200, response.text
    if not more.get("stream"):
        return response.json()
    return events(response)


def test_completion_logprobs_are_columns_of_tokens():
    parsed = Completion.model_validate(ask(COMPLETION, answer(*TEXTS, logprobs=2)))
    shown = parsed.choices[0].logprobs
    assert (shown.tokens, shown.text_offset) == (TOKENS, OFFSETS)
    assert shown.token_logprobs == [-0.25, -0.5] * 3
    assert shown.top_logprobs[0] == {"a": -1.0, "b": -2.0, "na": -0.25}, "the chosen one is there"


def test_completion_with_0_logprobs_has_only_the_chosen_tokens():
    shown = ask((COMPLETION[0], COMPLETION[1] | {"logprobs": 0}), answer("yes", logprobs=0))
    assert shown["choices"][0]["logprobs"]["top_logprobs"] is None
    assert shown["choices"][0]["logprobs"]["tokens"] == ["y", "es"]


def test_chat_logprobs_are_rows_of_tokens():
    content = ask(CHAT, answer(*TEXTS, logprobs=2))
    rows = ChatCompletion.model_validate(content).choices[0].logprobs.content
    assert [r.token for r in rows] == TOKENS
    assert bytes(b for r in rows for b in r.bytes).decode() == "".join(TEXTS)
    assert [r.logprob for r in rows] == [-0.25, -0.5] * 3
    assert [(t.token, t.logprob, t.bytes) for t in rows[0].top_logprobs] == [
        ("a", -1.0, [97]),
        ("b", -2.0, [98]),
    ]


def test_streamed_logprobs_have_each_token_once():
    first, held, last = answer(*TEXTS, logprobs=2)
    assert not held.text
    chunks = ask(COMPLETION, [first, held, last], stream=True)
    shown = [c["choices"][0]["logprobs"] for c in chunks]
    assert [t["tokens"] for t in shown] == [TOKENS[:2], TOKENS[2:]]
    assert [offset for t in shown for offset in t["text_offset"]] == OFFSETS
    rows = [
        row
        for chunk in ask(CHAT, [first, held, last], stream=True)
        for row in ChatCompletionChunk.model_validate(chunk).choices[0].logprobs.content
    ]
    assert [r.token for r in rows] == TOKENS


def test_partial_characters_are_shown_as_bytes_and_infinities_as_numbers():
    half = TokenText(b"\xf0\x9f", -math.inf, 0, ((b"\x99\x82", -1.0),))
    shown = completion_logprobs([half])
    assert shown["tokens"] == ["bytes:\\xf0\\x9f"]
    assert shown["top_logprobs"] == [{"bytes:\\xf0\\x9f": -9999.0, "bytes:\\x99\\x82": -1.0}]
    (row,) = chat_logprobs([half])["content"]
    assert (row["bytes"], row["logprob"]) == ([0xF0, 0x9F], -9999.0)
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_likelier_of_two_tokens_with_the_same_text_is_shown():
    shown = completion_logprobs([TokenText(b"a", -2.0, 0, ((b"a", -0.5), (b"a", -1.0)))])
    assert shown["top_logprobs"] == [{"a": -0.5}]
    shown = completion_logprobs([TokenText(b"a", -0.5, 0, ((b"b", -1.0), (b"a", -3.0)))])
    assert shown["top_logprobs"] == [{"b": -1.0, "a": -0.5}]


TIMES = {
    "time_to_first_token_ms": 1000.0,
    "generation_time_ms": 2000.0,
    "queue_time_ms": 500.0,
    "mean_itl_ms": 666.667,
    "tokens_per_second": 1.333,
}
DRAFTS = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.6,
    "acceptance_histogram": [1, 0, 0, 1],
    "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "3": [0, 0, 0, 1]},
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 5,
    "num_spec_tokens": 3,
}
SUMMARY = {**TIMES, "speculative_decoding": DRAFTS, "draft_index_version": 7}
STEPS = {"per_step_accepted": [3, 0], "per_step_drafted": [3, 2]}
either_endpoint = pytest.mark.parametrize("path", GOOD)


def answered(path, **more):
    return ask((path, GOOD[path]), answer("Hel", "lo"), **more)


@either_endpoint
def test_answer_has_metrics_unless_the_request_declines_metrics(path):
    assert answered(path)["metrics"] == SUMMARY
    assert answered(path, metrics="summary")["metrics"] == SUMMARY
    detailed = answered(path, metrics="detailed")["metrics"]
    assert detailed == SUMMARY | {"speculative_decoding": DRAFTS | STEPS}
    assert "metrics" not in answered(path, metrics="none")


@either_endpoint
def test_stream_has_metrics_with_the_usage_or_with_its_last_choice(path):
    usage = {"stream_options": {"include_usage": True}}
    for more in ({}, usage):
        *pieces, last = answered(path, stream=True, **more)
        assert last["metrics"] == SUMMARY
        assert bool(last["choices"]) == (not more)
        assert all("metrics" not in piece for piece in pieces)
        assert all(
            "metrics" not in piece for piece in answered(path, stream=True, metrics="none", **more)
        )


def of(tokens, drafted, accepted, timings=None):
    acceptance = Acceptance(tuple(drafted), tuple(accepted))
    times = timings or Timings(0.0, 0.0, 0.0)
    return GenerationResult("id", tokens, "", "stop", 5, times, acceptance)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_draft_counts_include_only_steps_with_a_draft(steps):
    steps = [(max(pair), min(pair)) for pair in steps]
    found = metrics_of(
        of((1,), *zip(*steps, strict=True)) if steps else of((1,), (), ()), "detailed"
    )
    drafted = found["speculative_decoding"]
    real = [(d, a) for d, a in steps if d > 0]
    assert drafted["per_step_drafted"] == [d for d, _ in real]
    assert drafted["num_spec_steps"] == sum(drafted["acceptance_histogram"]) == len(real)
    assert drafted["num_draft_tokens"] == sum(d for d, _ in real)
    assert len(drafted["acceptance_histogram"]) == drafted["num_spec_tokens"] + 1
    weighed = sum(kept * steps for kept, steps in enumerate(drafted["acceptance_histogram"]))
    assert drafted["num_accepted_draft_tokens"] == weighed == sum(a for _, a in real)
    by_length = drafted["acceptance_histogram_by_draft_length"]
    assert all(len(counts) == int(size) + 1 for size, counts in by_length.items())
    assert sum(map(sum, by_length.values())) == len(real)
    mean = 1 + weighed / len(real) if real else 1.0
    assert drafted["mean_acceptance_length"] == pytest.approx(mean)


def test_rates_of_an_instant_one_token_answer_are_null():
    found = metrics_of(of((1,), (0,), (0,)), "summary")
    assert (found["mean_itl_ms"], found["tokens_per_second"]) == (None, None)
    assert found["speculative_decoding"]["acceptance_histogram"] == [0]
    assert found["speculative_decoding"]["draft_acceptance_rate"] == 0.0
    assert found["draft_index_version"] is None
