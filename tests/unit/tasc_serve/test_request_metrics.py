"""The metrics object of an answer says what vLLM's does, and is where its readers look."""

import dataclasses
import json

import pytest
from fake_backend import GOOD, FakeBackend, Service, answer
from hypothesis import given
from hypothesis import strategies as st

from tasc_engine import Acceptance, GenerationResult, Timings
from tasc_serve.request_metrics import metrics_of

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


def ask(path, **more):
    service = Service(FakeBackend(*answer("Hel", "lo")))
    return service.ask("POST", path, json=GOOD[path] | more)


def chunks(path, **more):
    *lines, _, _ = ask(path, stream=True, **more).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@either_endpoint
def test_an_answer_has_a_summary_unless_it_is_told_otherwise(path):
    assert ask(path).json()["metrics"] == SUMMARY
    assert ask(path, metrics="summary").json()["metrics"] == SUMMARY
    detailed = ask(path, metrics="detailed").json()["metrics"]
    assert detailed == SUMMARY | {"speculative_decoding": DRAFTS | STEPS}
    assert "metrics" not in ask(path, metrics="none").json()


@either_endpoint
def test_a_stream_has_it_with_the_usage_else_with_its_end(path):
    usage = {"stream_options": {"include_usage": True}}
    for more in ({}, usage):
        *pieces, last = chunks(path, **more)
        assert last["metrics"] == SUMMARY
        assert bool(last["choices"]) == (not more)
        assert all("metrics" not in piece for piece in pieces)
        assert all("metrics" not in piece for piece in chunks(path, metrics="none", **more))


def of(tokens, drafted, accepted, timings=None):
    acceptance = Acceptance(tuple(drafted), tuple(accepted))
    times = timings or Timings(0.0, 0.0, 0.0)
    return GenerationResult("id", tokens, "", "stop", 5, times, acceptance)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_counts_are_those_of_the_steps_that_had_a_draft(steps):
    steps = [(max(pair), min(pair)) for pair in steps]
    found = metrics_of(of((1,), *zip(*steps, strict=True)) if steps else of((1,), (), ()), True)
    told = found["speculative_decoding"]
    real = [(d, a) for d, a in steps if d > 0]
    assert told["per_step_drafted"] == [d for d, _ in real]
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) == len(real)
    assert told["num_draft_tokens"] == sum(d for d, _ in real)
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    weighed = sum(kept * steps for kept, steps in enumerate(told["acceptance_histogram"]))
    assert told["num_accepted_draft_tokens"] == weighed == sum(a for _, a in real)
    by_length = told["acceptance_histogram_by_draft_length"]
    assert all(len(counts) == int(size) + 1 for size, counts in by_length.items())
    assert sum(map(sum, by_length.values())) == len(real)
    mean = 1 + weighed / len(real) if real else 1.0
    assert told["mean_acceptance_length"] == pytest.approx(mean)


def test_one_token_and_no_time_leave_nothing_to_divide_by():
    found = metrics_of(of((1,), (0,), (0,)), False)
    assert (found["mean_itl_ms"], found["tokens_per_second"]) == (None, None)
    assert found["speculative_decoding"]["acceptance_histogram"] == [0]
    assert found["speculative_decoding"]["draft_acceptance_rate"] == 0.0
    assert found["draft_index_version"] is None


def test_its_level_is_all_that_a_request_changes_of_it():
    result = dataclasses.replace(answer("a")[0].result, tokens=(1, 2))
    both = [metrics_of(result, detailed) for detailed in (False, True)]
    for metrics in both:
        metrics.pop("speculative_decoding")
    assert both[0] == both[1]
