import math

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metric_names import METRICS
from tasc_draft.drafts import SOURCES
from tasc_engine.stats import EngineTotals, StepRecord
from tasc_protocol import GenerationResult, LabelScores, Timings
from tasc_runtime.engine.drafters import NeuralMetrics
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.metrics.replica_metrics import ManyHistogram, ReplicaMetrics
from tasc_store import Artifact
from tasc_store.batches.leases import Waiting

OWN = {"task": "tag", "model_name": "tiny", "proposer": "tasc"}
POSITIONS = 3


@st.composite
def step_records(draw: st.DrawFn) -> StepRecord:
    cells = len(SOURCES) * POSITIONS
    drafted = draw(st.lists(st.integers(0, 9), min_size=cells, max_size=cells))
    reached = [draw(st.integers(0, most)) for most in drafted]
    accepted = [draw(st.integers(0, most)) for most in reached]
    shape = (len(SOURCES), POSITIONS)
    return StepRecord(
        row_steps=draw(st.integers(0, 8)),
        drafts=draw(st.integers(0, 8)),
        drafted=np.array(drafted, np.int64).reshape(shape),
        reached=np.array(reached, np.int64).reshape(shape),
        accepted=np.array(accepted, np.int64).reshape(shape),
        bonus_tokens=draw(st.integers(0, 8)),
        prompt_tokens=draw(st.integers(0, 100)),
        cached_tokens=0,
        draft_seconds=0.25,
        verify_seconds=0.5,
        paused=draw(st.booleans()),
        cost_error=draw(st.floats(0, 3)),
        shared_tokens=draw(st.integers(0, 100)),
        draft_failures=draw(st.integers(0, 3)),
        forced_tokens=draw(st.integers(0, 9)),
    )


def replica() -> tuple[CollectorRegistry, ReplicaMetrics]:
    registry = CollectorRegistry()
    return registry, ReplicaMetrics(registry, task="tag", model_name="tiny", proposer="tasc")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, OWN | labels)


def result(reason: str, tokens: tuple[int, ...]) -> GenerationResult:
    return GenerationResult("r", tokens, "", reason, 3, Timings(0.001, 0.004, 0.02))


def test_counters_are_sums_of_steps_and_generated_tokens_are_accepted_bonus_or_forced(
    everything, seed
):
    @hypothesis.seed(seed)
    @settings(max_examples=100 if everything else 10, database=None)
    @given(st.lists(step_records(), min_size=1, max_size=5))
    def counted(records: list[StepRecord]) -> None:
        assert_counters_are_sums(records)

    counted()


def assert_counters_are_sums(records: list[StepRecord]) -> None:
    registry, metrics = replica()
    totals = EngineTotals(len(SOURCES), POSITIONS)
    for record in records:
        metrics.observe_step(record)
        totals.add(record)
    spec = "tasc_spec_decode_num_"
    for name, total in {
        "tasc_verify_steps_total": totals.steps,
        "tasc_row_steps_total": totals.row_steps,
        "tasc_prompt_tokens_total": totals.prompt_tokens,
        "tasc_prefix_cache_hits_total": totals.shared_tokens,
        "tasc_draft_failures_total": sum(record.draft_failures for record in records),
        "tasc_drafting_paused_steps_total": sum(record.paused for record in records),
        "tasc_step_cost_error_ratio": records[-1].cost_error,
        spec + "drafts_total": totals.drafts,
        "tasc_draft_seconds_sum": totals.draft_seconds,
        "tasc_verify_seconds_sum": totals.verify_seconds,
    }.items():
        assert value(registry, name) == total, name
    accepted = [value(registry, spec + "accepted_tokens_total", source=s) for s in SOURCES]
    assert accepted == totals.accepted.sum(1).tolist()
    bonus = value(registry, "tasc_bonus_tokens_total")
    forced = value(registry, "tasc_forced_tokens_total")
    assert forced == totals.forced_tokens
    assert value(registry, "tasc_generation_tokens_total") == sum(accepted) + bonus + forced
    drafted = [value(registry, spec + "draft_tokens_total", source=s) for s in SOURCES]
    assert drafted == totals.drafted.sum(1).tolist()
    for name, counts in (("drafts", totals.reached), ("accepted_tokens", totals.accepted)):
        for source, row in zip(SOURCES, counts.tolist(), strict=True):
            for position, count in enumerate(row):
                labels = {"source": source, "position": str(position)}
                assert value(registry, f"{spec}{name}_per_pos_total", **labels) == count


def test_deeper_draft_adds_position_labels():
    registry, metrics = replica()
    for positions in (1, 4, 2):
        counts = np.ones((len(SOURCES), positions), np.int64)
        metrics.observe_step(StepRecord(1, 1, counts, counts, counts, 1, 0, 0, 0.0, 0.0))
    name = "tasc_spec_decode_num_drafts_per_pos_total"
    by_position = [value(registry, name, source="corpus", position=str(i)) for i in range(5)]
    assert by_position == [3, 2, 1, 1, None]


def test_gap_between_chunks_is_spread_over_the_tokens_of_the_later_chunk():
    registry, metrics = replica()
    metrics.observe_inter_token(0.006, 3)
    metrics.observe_inter_token(0.5, 0)
    name = "tasc_inter_token_latency_seconds"
    assert value(registry, name + "_count") == 3
    assert value(registry, name + "_sum") == pytest.approx(0.006)
    assert value(registry, name + "_bucket", le="0.001") == 0
    assert value(registry, name + "_bucket", le="0.002") == 3


def test_batched_observations_equal_single_observations():
    edges = (0.1, 0.25, 1.0)
    together, alone = (ManyHistogram("h", "", registry=None, buckets=edges) for _ in range(2))
    times = {0.0: 2, 0.1: 1, 0.25: 3, 0.3: 1, 1.0: 1, 7.0: 4}
    together.observe_all(list(times), list(times.values()))
    for seconds, often in times.items():
        for _ in range(often):
            alone.observe(seconds)
    (found,), (wanted,) = together.collect(), alone.collect()
    assert [
        (s.labels, pytest.approx(s.value)) for s in wanted.samples if "created" not in s.name
    ] == [(s.labels, s.value) for s in found.samples if "created" not in s.name]


def test_load_gauges_are_current_after_a_change_of_proposer():
    now = [(1, 2, 0.5)]
    registry = CollectorRegistry()
    metrics = ReplicaMetrics(
        registry, task="tag", model_name="tiny", proposer="tasc", load=lambda: now[-1]
    )
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")

    def shown(proposer: str) -> tuple[float | None, ...]:
        return tuple(value(registry, f"tasc_{name}", proposer=proposer) for name in names)

    assert shown("tasc") == (1, 2, 0.5)
    now.append((0, 0, 0.25))
    assert shown("tasc") == (0, 0, 0.25)
    metrics.set_proposer("other")
    assert (shown("tasc"), shown("other")) == ((None,) * 3, (0, 0, 0.25))


def test_request_is_counted_by_finish_reason_and_timed_once():
    registry, metrics = replica()
    metrics.observe_result(result("stop", (5, 6)))
    metrics.observe_result(result("length", (5,)))
    counted = {
        reason: value(registry, "tasc_request_success_total", finished_reason=reason)
        for reason in ("stop", "length")
    }
    assert counted == {"stop": 1, "length": 1}
    assert value(registry, "tasc_e2e_request_latency_seconds_count") == 2
    assert value(registry, "tasc_request_queue_time_seconds_sum") == pytest.approx(0.002)
    assert value(registry, "tasc_time_to_first_token_seconds_count") == 2


def artifact(version: int, forecast: float | None = None) -> Artifact:
    return Artifact("tag", "f", version, 1, "0", 1, 1, 1e9, forecast)


def test_index_metrics_exist_while_an_index_is_used_and_each_later_change_is_a_swap():
    registry, metrics = replica()
    names = ["index_swaps_total", "draft_index_bytes", "forecast_tokens_per_step"]
    names += ["draft_index_built_timestamp_seconds"]
    third, fourth, seen = artifact(3, forecast=4.5), artifact(4), []
    for index, size in ((None, 0), (third, 10), (third, 11), (fourth, 20), (None, 0)):
        metrics.set_index(index, size)
        labels = [{"fingerprint": "f", "version": v} for v in ("None", "3", "4")]
        shown = [o["version"] for o in labels if value(registry, "tasc_draft_index_info", **o) == 1]
        seen.append((shown, *(value(registry, f"tasc_{name}") for name in names)))
    assert seen == [
        ([], 0, 0, None, None),
        (["3"], 1, 10, 4.5, 1e9),
        (["3"], 1, 11, 4.5, 1e9),
        (["4"], 2, 20, None, 1e9),
        ([], 3, 0, None, None),
    ]


def test_failover_counters_start_at_0():
    registry = CollectorRegistry()
    GatewayMetrics(registry).set_replicas("tag", 2)
    for reason in ("died", "silent", "broken"):
        labels = {"task": "tag", "reason": reason}
        assert registry.get_sample_value("tasc_failovers_total", labels) == 0
    assert registry.get_sample_value("tasc_failovers_refused_total", {"task": "tag"}) == 0


def test_batch_gauges_of_the_workers_tasks_start_at_0():
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, ["tag"])
    names = ("tasc_batch_waiting", "tasc_batch_oldest_waiting_seconds")
    seen = []
    for waiting in ({}, {"other": Waiting(2, 30.0)}, {"tag": Waiting(1, 5.0)}):
        metrics.set_batches(waiting)
        for task in ("tag", "other"):
            seen.append(tuple(registry.get_sample_value(n, {"task": task}) for n in names))
    assert seen == [(0, 0), (None, None), (0, 0), (2, 30), (1, 5), (0, 0)]


def test_drafter_vocabulary_is_a_histogram_and_the_off_reason_is_a_gauge():
    registry = CollectorRegistry()
    metrics = NeuralMetrics(registry, {"task": "tag"})
    metrics.sizes([10, 64, 65, 300_000])
    name = "tasc_active_vocabulary_tokens"
    by_edge = {
        edge: registry.get_sample_value(f"{name}_bucket", {"task": "tag", "le": edge})
        for edge in ("64.0", "256.0", "262144.0", "+Inf")
    }
    assert by_edge == {"64.0": 2, "256.0": 3, "262144.0": 3, "+Inf": 4}
    metrics.off("slow")
    off = {
        reason: registry.get_sample_value(
            "tasc_neural_drafting_off", {"task": "tag", "reason": reason}
        )
        for reason in ("slow", "failed")
    }
    assert off == {"slow": 1, "failed": 0}


def classified(label: str, sure: float = 0.75, likeliest: str = "") -> GenerationResult:
    logprobs = math.log(sure), math.log(1 - sure)
    scores = LabelScores((likeliest or label, "other one"), (0, 1), logprobs, 0.0, 0.0, 2)
    return replace(result("stop", ()), text=label, scores=scores)


def by_label(registry: CollectorRegistry, name: str, proposer: str = "tasc") -> dict[str, float]:
    text = generate_latest(registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    own = [s for s in samples if s.name == name and s.labels["proposer"] == proposer]
    return {s.labels["label"]: s.value for s in own}


def test_classifications_are_counted_by_label_up_to_a_number_of_labels():
    registry, metrics = replica()
    for name in [*(f"label {i}" for i in range(60)), "label 1"]:
        metrics.observe_result(classified(name))
    metrics.observe_result(classified("", likeliest="news"))
    metrics.observe_result(classified("none of these", likeliest="news"))
    metrics.observe_result(classified("label 1"), own_labels=False)
    decided = classified("label 1")
    metrics.observe_result(replace(decided, scores=replace(decided.scores, mass=0.5)))
    counts = by_label(registry, "tasc_classifications_total")
    assert len(counts) == 52
    assert counts["label 0"] == 1
    assert counts["label 1"] == 2
    assert counts["other"] == 10
    assert counts["from_request"] == 1
    assert value(registry, "tasc_classifications_abstained_total") == 2
    confidence = value(registry, "tasc_classification_confidence_sum")
    assert confidence == pytest.approx(64 * 0.75)


def test_the_commonest_labels_of_the_corpus_have_names_in_both_series():
    registry, metrics = replica()
    metrics.observe_result(classified("rare"))
    rows = {"rare": 1, **{f"label {i}": 2 + i for i in range(60)}}
    metrics.set_labels(rows)
    counts = by_label(registry, "tasc_classifications_total")
    assert counts == dict.fromkeys([*(f"label {i}" for i in range(10, 60)), "other"], 0)
    named = {label: rows[label] for label in counts if label != "other"}
    others = sum(rows.values()) - sum(named.values())
    assert by_label(registry, "tasc_corpus_label_rows") == {**named, "other": others}
    metrics.observe_result(classified("rare"))
    metrics.observe_result(classified("label 59"))
    metrics.set_labels({**rows, "label 59": 50})
    counts = by_label(registry, "tasc_classifications_total")
    assert (counts["label 59"], counts["other"]) == (1, 1), "the names are the same"
    metrics.set_labels({**rows, "label 59": 7})
    counts = by_label(registry, "tasc_classifications_total")
    assert (len(counts), sum(counts.values())) == (51, 0), "there are other names"
    metrics.observe_result(classified("label 9"))
    metrics.observe_result(classified("label 59"))
    counts = by_label(registry, "tasc_classifications_total")
    assert (counts["label 9"], counts["other"]) == (1, 1)


def test_label_rows_follow_the_index_the_labels_and_the_proposer():
    registry, metrics = replica()
    rows = "tasc_corpus_label_rows"
    long = "x" * 100
    metrics.set_labels({"other": 3, long: 1, f"{long}!": 1})
    assert by_label(registry, rows) == {"other": 3, long: 2}
    metrics.set_proposer("mixed")
    assert by_label(registry, rows) == by_label(registry, rows, "mixed") == {}
    metrics.set_labels({"yes": 3, "no": 0})
    assert by_label(registry, rows, "mixed") == {"yes": 3, "no": 0, "other": 0}
    for unknown in ({"yes": 0, "no": 0}, {}):
        metrics.set_labels(unknown)
        metrics.observe_result(classified("yes"))
        assert by_label(registry, rows, "mixed") == {}
    assert by_label(registry, "tasc_classifications_total", "mixed")["yes"] == 2


def test_exported_metrics_are_documented_and_name_their_task():
    registry, metrics = replica()
    gateway = GatewayMetrics(registry, ["tag"])
    gateway.observe_http("tag", 200, 0.1)
    gateway.limited("tag", "key").inc()
    gateway.ignored("tag").inc()
    gateway.failover_seconds("tag").observe(0.5)
    gateway.proxy_seconds("tag").observe(0.001)
    gateway.replica_seconds("tag").observe(0.001)
    gateway.set_replicas("tag", 2)
    BatchMetrics(registry).begun("tag")
    NeuralMetrics(registry, {"task": "tag", "model_name": "tiny"})
    counts = np.ones((len(SOURCES), 1), np.int64)
    metrics.observe_step(StepRecord(1, 1, counts, counts, counts, 1, 0, 0, 0.0, 0.0))
    metrics.set_index(artifact(1, forecast=3.0), 10)
    metrics.observe_result(classified("music"))
    metrics.set_labels({"music": 1})
    text = generate_latest(registry).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    exported = [s for s in samples if not s.name.endswith("_created")]
    assert {s.name for s in exported} == METRICS
    assert {s.labels["task"] for s in exported} == {"tag"}
