"""Metrics of processes and requests, as Prometheus reads them."""

import dataclasses
import json
import shutil
import subprocess

import pytest
from fake_backend import GOOD, FakeBackend, Service, answer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from support import refused
from tasc_engine import Acceptance, GenerationResult, Timings
from tasc_serve.http.responses import metrics_of
from tasc_serve.metrics.discovery import merge

# (task, sixteenths of a second): sums of sixteenths are exact in floating point.
EVENTS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 64)), max_size=8)


def text_of(events: list[tuple[str, int]]) -> str:
    registry = CollectorRegistry()
    done = Counter("done", "Things done.", ["task"], registry=registry)
    took = Histogram("took_seconds", "Time.", ["task"], registry=registry, buckets=(1, 2, 3))
    held = Gauge("held", "Things held.", registry=registry)
    for task, sixteenths in events:
        done.labels(task).inc()
        took.labels(task).observe(sixteenths / 16)
        held.inc()
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.name.endswith("_created")
    }


@given(st.lists(EVENTS, min_size=1, max_size=4))
def test_merging_processes_gives_what_one_process_would_have_counted(shares):
    together = text_of([event for share in shares for event in share])
    assert samples(merge(map(text_of, shares))) == samples(together)


@given(EVENTS)
def test_a_merged_text_merges_to_itself(events):
    once = merge([text_of(events), text_of(events)])
    assert "done_total" in once
    assert merge([once]) == once


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1))
def test_a_label_value_survives_whatever_it_holds(name):
    registry = CollectorRegistry()
    Counter("done", "Things done.", ["task"], registry=registry).labels(name).inc(2)
    text = generate_latest(registry).decode()
    assert registry.get_sample_value("done_total", {"task": name}) == 2
    assert samples(merge([text, text])) == dict.fromkeys(samples(text), 4)


@pytest.mark.parametrize(
    ("name", "merged"),
    [
        ("held", 0.75),
        ("index_info", 0.5),
        ("cache_usage_ratio", 0.5),
        ("tokens_per_step", 0.5),
        ("replicas_reachable", 0.5),
        ("built_timestamp_seconds", 0.5),
    ],
)
def test_gauges_are_summed_but_a_mark_a_ratio_a_time_and_what_all_see_are_not(name, merged):
    texts = [f"# TYPE {name} gauge\n{name} {value}\n" for value in (0.25, 0.5)]
    assert samples(merge(texts)) == {(name, frozenset()): merged}


def test_what_says_something_of_one_process_only_is_left_out():
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    Counter("done", "Things done.", registry=registry)
    created = "# TYPE done_created gauge\ndone_created 1.7e9\n"
    text = generate_latest(registry).decode() + created
    assert "python_info" in text
    assert "process_cpu_seconds_total" in text
    assert (
        merge([text])
        == "# HELP done_total Things done.\n# TYPE done_total counter\ndone_total 0.0\n"
    )


def test_each_family_is_introduced_once_under_its_exported_name():
    lines = merge([text_of([("a", 1)]), text_of([("b", 2)])]).splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert types == [
        "# TYPE done_total counter",
        "# TYPE took_seconds histogram",
        "# TYPE held gauge",
    ]
    assert sum(line.startswith("# HELP") for line in lines) == len(types)


@pytest.mark.prometheus
def test_prometheus_itself_accepts_the_merged_text():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on PATH; it comes with Prometheus")
    merged = merge([text_of([("a", 1)]), text_of([("b", 2)])])
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=merged, text=True, capture_output=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_processes_that_disagree_on_a_type_are_refused_by_name():
    texts = [f"# TYPE held {kind}\nheld 1\n" for kind in ("gauge", "summary")]
    with refused(ValueError, "held"):
        merge(texts)


def test_what_is_no_prometheus_text_is_refused():
    with refused(ValueError, "nothing"):
        merge(["<html>nothing here</html>"])


def test_no_process_gives_an_empty_text():
    assert merge([]) == ""


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
