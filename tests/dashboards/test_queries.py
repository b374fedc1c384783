import math
import re
from pathlib import Path

import pytest
from panel_queries import QUERIES
from prometheus_server import Prometheus

from support import eventually

pytestmark = pytest.mark.prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
SPEC = "tasc_spec_decode_num_"


def test_dashboards_have_queries():
    assert len(QUERIES) > 60


@pytest.mark.parametrize("name", QUERIES)
def test_each_query_returns_numbers(prometheus: Prometheus, name: str):
    def numbers():
        found = prometheus.query(QUERIES[name])
        return found and not [series for series, value in found if math.isnan(value)]

    eventually(numbers)  # a process that was scraped too late is away until it is again


# Panel, label and value of the ratios of the step that the exporter repeats.
KNOWN = [
    ("drafting: Tokens per step, live and forecast, timeseries, A", {}, 16 / 8),
    ("drafting: Tokens per step, live and forecast, timeseries, B", {}, 2.5),
    ("drafting: Block efficiency, stat, A", {}, 16 / 8),
    ("drafting: Coverage, stat, A", {}, 6 / 8),
    ("drafting: Coverage over time, timeseries, A", {}, 6 / 8),
    ("drafting: Output from drafts, stat, A", {}, 5 / 16),
    ("drafting: Acceptance rate, stat, A", {}, 5 / 9),
    ("drafting: Rows per step, timeseries, A", {}, 8),
    ("drafting: Acceptance rate by source, timeseries, A", {"source": "corpus"}, 4 / 6),
    ("drafting: Acceptance rate by source, timeseries, A", {"source": "prompt"}, 1 / 3),
    ("drafting: Acceptance rate by draft position, timeseries, A", {"position": "0"}, 4 / 6),
    ("drafting: Acceptance rate by draft position, timeseries, A", {"position": "1"}, 1 / 3),
    ("drafting: Drafting time / verify time, timeseries, A", {}, 1 / 4),
    ("drafting: Real steps / step costs, timeseries, A", {}, 0.125),
    ("drafting: Why rows go without a draft, timeseries, A", {}, 1),
    ("drafting: Why rows go without a draft, timeseries, B", {}, 1),
    ("drafting: Why rows go without a draft, timeseries, C", {}, 0),
    ("drafting: Tokens a drafter drafts from, timeseries, A", {}, 500),
    ("drafting: Drafters switched off, timeseries, A", {"reason": "slow"}, 1),
    ("drafting: Drafters switched off, timeseries, A", {"reason": "failed"}, 0),
    ("corpora: Kept of finished, timeseries, A", {}, 1 / 2),
    ("corpora: Replicas by index version, timeseries, A", {"version": "7"}, 1),
    ("corpora: Index age, timeseries, A", {}, 86400),
    ("corpora: Index size, timeseries, A", {}, 4096),
    ("corpora: Batches waiting and in progress, timeseries, A", {}, 4),
    ("corpora: Batches waiting and in progress, timeseries, B", {}, 1),
    ("corpora: Longest wait for a worker, timeseries, A", {}, 90),
    ("corpora: Rows in engines' hands, timeseries, A", {}, 16),
    ("latency: Share of 503 and 504, timeseries, A", {"code": "503"}, 1 / 5),
    ("latency: Share of 503 and 504, timeseries, A", {"code": "504"}, 1 / 5),
    ("latency: Replicas seen, timeseries, A", {}, 2),
    ("latency: Replicas by version of the task, timeseries, A", {"version": "3"}, 1),
    ("latency: Time per step, timeseries, A", {}, 0.001),
    ("latency: Time per step, timeseries, B", {}, 0.004),
    ("latency: Time per step, timeseries, C", {}, 0.0005),
    ("latency: Running and waiting, timeseries, A", {}, 3),
    ("latency: Running and waiting, timeseries, B", {}, 2),
    ("latency: KV cache in use, timeseries, A", {}, 0.25),
    ("latency: Prompt tokens not computed again, timeseries, A", {}, 60 / 80),
    ("latency: Label shares, timeseries, A", {"label": "alarm"}, 2 / 4),
    ("latency: Label shares, timeseries, A", {"label": "music"}, 1 / 4),
    ("latency: Label shares, timeseries, B", {}, 1 / 4),
    ("latency: Abstentions, timeseries, A", {}, 1 / 4),
    ("latency: Confidence, timeseries, A", {}, 0.75),
    ("latency: Confidence, timeseries, B", {}, 0.54),  # interpolated between 0.5 and 0.6
    # (2/3 - 1/2) * ln(4/3) and (1/3 - 1/2) * ln(2/3)
    ("latency: Label drift, timeseries, A", {}, 0.0479 + 0.0676),
    ("latency: Labels that drift, timeseries, A", {"label": "alarm"}, 2 / 3),
    ("latency: Labels that drift, timeseries, B", {"label": "alarm"}, 1 / 2),
    ("latency: Forward passes per classification, timeseries, A", {}, 3),
    ("latency: Forward passes per classification, timeseries, B", {}, 4),
]


@pytest.mark.parametrize(("name", "labels", "value"), KNOWN)
def test_panel_shows_the_exported_ratio(prometheus, name, labels, value):
    def shown():
        found = prometheus.query(QUERIES[name])
        return [v for series, v in found if labels.items() <= series.items()]

    eventually(lambda: len(shown()) == 2)
    # Not exact: a scrape may fall between two counters of one step.
    assert shown() == pytest.approx([value] * 2, rel=0.05)


@pytest.mark.parametrize(
    ("panel", "positions"),
    [
        ("Acceptance rate by draft position, timeseries", {"0", "1"}),
        ("Acceptance rate by position over time, heatmap", {"00", "01"}),
    ],
)
def test_position_that_no_draft_reached_is_not_shown(prometheus, panel, positions):
    found = prometheus.query(QUERIES[f"drafting: {panel}, A"])
    assert {series["position"] for series, _ in found} == positions
    exported = prometheus.query(SPEC + "drafts_per_pos_total")
    assert {series["position"] for series, _ in exported} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("panel", "label", "only"),
    [
        ("latency: Failovers by cause, timeseries, A", "reason", "died"),
        ("latency: Rate-limited requests, timeseries, A", "limit", "key"),
        ("drafting: Shadow checks, timeseries, B", "reason", "old"),
        ("corpora: Answers lost to the corpus, timeseries, A", "reason", "full"),
        ("corpora: Batches ended, timeseries, A", "status", "completed"),
    ],
)
def test_panel_shows_only_the_cause_that_happened(prometheus, panel, label, only):
    found = prometheus.query(QUERIES[panel])
    assert {series[label] for series, value in found if value > 0} == {only}


@pytest.mark.parametrize(
    ("panel", "lower", "upper"),
    [
        ("End to end in the replica", 0.01, 0.02),
        ("Time to first token", 0.005, 0.01),
        ("Queue time", 0.0005, 0.001),
        ("End to end at the gateway", 0.01, 0.02),
        ("Inter-token latency", 0.001, 0.002),
    ],
)
def test_quantiles_lie_in_the_observed_bucket(prometheus, panel, lower, upper):
    for letter in "ABC":
        found = prometheus.query(QUERIES[f"latency: {panel}, timeseries, {letter}"])
        served = [value for series, value in found if series["task"] != "-"]
        assert len(served) == 2
        assert all(lower <= value <= upper for value in served)


@pytest.mark.parametrize("label", ["task", "model_name"])
def test_filters_offer_the_served_tasks_and_models(prometheus, label):
    values = prometheus.ask(f"label/{label}/values", **{"match[]": "tasc_verify_steps_total"})
    assert values == {"task": ["massive_en", "pos_ewt"], "model_name": ["tiny"]}[label]


# Alerts for the faults that the exporter counts. Alerts for lasting states are pending at first.
TOLD = {
    *("TascAnswersDiffer", "TascBatchEngines", "TascCollectedRowsDropped", "TascDrafterOff"),
    *("TascErrors", "TascFailovers", "TascFailoversRefused", "TascRateLimited"),
}


def test_shipped_rules_record_ratios_and_fire_only_the_expected_alerts(prometheus):
    recorded = re.findall(r"record: (\S+)", (DEPLOY / "rules.yml").read_text("utf-8"))
    assert len(recorded) > 3
    for name in recorded:
        eventually(lambda name=name: len({s["task"] for s, _ in prometheus.query(name)}) == 2)
    eventually(lambda: {alert["labels"]["alertname"] for alert in alerts(prometheus)} >= TOLD)
    assert {alert["labels"]["alertname"] for alert in alerts(prometheus)} == TOLD


def alerts(prometheus: Prometheus) -> list[dict]:
    return prometheus.ask("alerts")["alerts"]
