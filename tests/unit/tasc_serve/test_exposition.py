"""Metrics of processes and requests, as Prometheus reads them."""

import shutil
import subprocess

import pytest
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
def test_merged_metrics_equal_the_metrics_of_one_process(shares):
    together = text_of([event for share in shares for event in share])
    assert samples(merge(map(text_of, shares))) == samples(together)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1))
def test_any_label_value_survives_the_merge(name):
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
def test_gauges_are_summed_except_marks_ratios_times_and_shared_values(name, merged):
    texts = [f"# TYPE {name} gauge\n{name} {value}\n" for value in (0.25, 0.5)]
    assert samples(merge(texts)) == {(name, frozenset()): merged}


def test_python_and_process_metrics_are_omitted_from_merged_metrics():
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


def test_each_family_has_one_header():
    lines = merge([text_of([("a", 1)]), text_of([("b", 2)])]).splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert types == [
        "# TYPE done_total counter",
        "# TYPE took_seconds histogram",
        "# TYPE held gauge",
    ]
    assert sum(line.startswith("# HELP") for line in lines) == len(types)
    assert merge([]) == ""


@pytest.mark.prometheus
def test_prometheus_itself_accepts_the_merged_text():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not on PATH; it comes with Prometheus")
    merged = merge([text_of([("a", 1)]), text_of([("b", 2)])])
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=merged, text=True, capture_output=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        (["# TYPE held gauge\nheld 1\n", "# TYPE held summary\nheld 1\n"], "held"),
        (["<html>nothing here</html>"], "nothing"),
    ],
)
def test_contradicting_metrics_are_refused_and_named(texts, named):
    with refused(ValueError, named):
        merge(texts)
