"""Tests which answers are kept for the corpus, and that an unavailable store is harmless."""

import threading

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from support import eventually, replace, ruled
from tasc_engine import GenerationResult, Sampling, Timings
from tasc_protocol import GuideSpec, Request
from tasc_serve.metrics.replica_metrics import ReplicaMetrics
from tasc_serve.monitor.collector import Collector, row_of
from tasc_serve.settings import CollectSettings
from tasc_store import CollectedRow, StoreError

CALL = Request("1", "wake me", templated=True)
REQUEST = Request("1", (5, 6), 9)
RESULT = GenerationResult("1", (7, 0), "alarm", "stop", 2, Timings(0, 0, 0))
OWN = GuideSpec("choice", ("alarm",))
ALL = {"sample_rate": 1.0, "flush_interval_s": 0.01}


def asked(**values):
    return structs.replace(CALL, **values)


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        (CALL, REQUEST),
        (structs.replace(CALL, n=3, stream=True, draft=False, max_tokens=4), REQUEST),
        (asked(parameters={"temperature": 0.0}, seed=3, logprobs=2), replace(REQUEST, logprobs=2)),
        (CALL, replace(REQUEST, guide=OWN)),  # the guide of the task
    ],
)
def test_answers_with_the_tasks_own_settings_are_collected(call, request_):
    assert row_of(call, request_, RESULT) == CollectedRow("wake me", "alarm")


@pytest.mark.parametrize(
    "call",
    [
        structs.replace(CALL, templated=False),
        structs.replace(CALL, prompt=(5, 6)),
        structs.replace(CALL, stop=("a",)),
        asked(guide=replace(OWN, field="guided_choice")),
        asked(adapter="other"),
        asked(logit_bias=((1, 2.0),)),
        asked(parameters={"repetition_penalty": 1.2}),
        asked(parameters={"top_k": 1}),
        asked(choice_index=1),
        asked(ignore_eos=True),
        asked(stop_token_ids=(7,)),
        asked(include_stop_str_in_output=True),
        asked(min_tokens=1),
        asked(truncate_prompt_tokens=1),
        structs.replace(CALL, prompt="\ud800"),
    ],
)
def test_answers_to_requests_with_other_settings_are_not_collected(call):
    assert row_of(call, REQUEST, RESULT) is None


def test_sampled_and_unfinished_answers_are_not_collected():
    assert row_of(CALL, replace(REQUEST, **ruled(Sampling(temperature=0.1))), RESULT) is None
    for broken in ({"finish_reason": "length"}, {"finish_reason": "error"}, {"text": " "}):
        assert row_of(CALL, REQUEST, structs.replace(RESULT, **broken)) is None


class Store:
    """Keeps rows while it is available."""

    def __init__(self, away=False):
        self.rows, self.tried = [], threading.Event()
        self.away = away

    def add(self, rows, *, max_rows, max_bytes):
        self.tried.set()
        if self.away:
            raise StoreError("no Redis answers")
        self.rows += rows
        return 2


class Collected:
    def __init__(self, store, **settings):
        self.registry = CollectorRegistry()
        metrics = ReplicaMetrics(self.registry, task="t", model_name="m", proposer="tasc")
        self.collector = Collector(store, CollectSettings(**{**ALL, **settings}), metrics)

    def give(self, n, begin=0):
        for i in range(begin, begin + n):
            self.collector.finished(structs.replace(CALL, prompt=str(i)), REQUEST, RESULT)

    def count(self, name, **labels):
        labels |= {"task": "t", "model_name": "m"}
        return self.registry.get_sample_value(f"tasc_collected_rows{name}_total", labels)


def inputs(store):
    return [row.input for row in store.rows]


def test_answers_reach_the_store_in_order_and_trimmed_rows_are_counted():
    store = Store()
    collected = Collected(store)
    collected.give(1200)
    eventually(lambda: len(store.rows) == 1200)
    assert inputs(store) == [str(i) for i in range(1200)]
    eventually(lambda: collected.count("") == 1200)
    assert collected.count("_dropped", reason="trimmed") >= 2 * 3, "at most 500 went at a time"
    collected.collector.close()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"sample_rate": 0.25}, range(3, 80, 4)), ({"flush_interval_s": 3600}, range(80))],
)
def test_sampled_share_of_answers_is_collected_and_flushed_on_close(settings, kept):
    store = Store()
    collected = Collected(store, **settings)
    collected.give(80)
    collected.collector.close()
    assert inputs(store) == [str(i) for i in kept]


def test_store_outage_loses_only_collected_answers(caplog):
    store = Store(away=True)
    collected = Collected(store, max_buffer_bytes=2600)
    collected.give(100)
    lost = collected.count("_dropped", reason="full")
    assert lost == 91, "about 260 bytes each"
    assert store.tried.wait(30)
    store.tried.clear()
    assert store.tried.wait(30), "it is tried again"
    store.away = False
    eventually(lambda: inputs(store) == [str(i) for i in range(9)])
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    collected.give(2, begin=100)
    eventually(lambda: inputs(store)[-2:] == ["100", "101"])
    collected.collector.close()


def test_collector_is_off_without_a_sample_rate():
    store = Store()
    before = threading.active_count()
    collected = Collected(store, sample_rate=0.0)
    collected.give(3)
    assert threading.active_count() == before
    collected.collector.close()
    assert store.rows == []
