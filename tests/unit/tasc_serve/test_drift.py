"""When a replica goes back to the index before: with evidence, once, and never to and fro."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tasc_engine import StepRecord
from tasc_serve.metrics.replica_metrics import DriftMetrics
from tasc_serve.monitor.drift import DriftGuard, DriftWindow
from tasc_serve.settings import RollbackSettings
from tasc_store import Artifact, StoreError, UnknownVersion

LABELS = {"task": "t", "model_name": "m", "proposer": "mixed"}


class Store:
    """A pointer that anybody may move, as the real one lets them."""

    task = "t"

    def __init__(self):
        self.current, self.asked, self.fault = 0, [], None
        self._done = set()

    def roll_back(self, bad, good):
        self.asked.append((bad, good))
        if self.fault:
            raise self.fault
        if self.current != bad or bad in self._done:
            return False
        self._done.add(bad)
        self.current = good
        return True


class Guarded:
    """A guard of one replica, and what it exports."""

    def __init__(self, store=None, **settings):
        self.store = store or Store()
        self.registry = CollectorRegistry()
        metrics = DriftMetrics(self.registry, LABELS)
        settings = RollbackSettings(**{"drop": 0.3, "row_steps": 100, **settings})
        self.guard = DriftGuard(self.store, settings, metrics)

    def swap(self, version, forecast=None):
        artifact = Artifact("t", "f", version, 1, "0", 1, 1, 0.0, forecast)
        self.store.current = version
        self.guard.swapped(artifact)

    def run(self, tokens_per_step, row_steps=100):
        none = np.zeros((1, 1), np.int64)
        for _ in range(row_steps // 5):
            tokens = round(5 * tokens_per_step)
            self.guard.observe(StepRecord(5, 0, none, none, none, tokens, 0, 0, 0.0, 0.0))
        self.guard.act()

    @property
    def rollbacks(self):
        return self.registry.get_sample_value("tasc_index_rollbacks_total", LABELS)

    @property
    def forecast(self):
        return self.registry.get_sample_value("tasc_forecast_tokens_per_step", LABELS)


def test_a_version_that_drafts_much_worse_is_rolled_back_once(caplog):
    guarded = Guarded()
    guarded.swap(4)
    guarded.run(5)
    guarded.swap(5)
    guarded.run(3, row_steps=95)
    assert guarded.store.asked == [], "not with less evidence than before"
    guarded.run(3, row_steps=5)
    assert (guarded.store.asked, guarded.rollbacks) == ([(5, 4)], 1)
    assert "5.000 to 3.000" in caplog.text
    assert "tasc index use t 5" in caplog.text
    guarded.run(1, row_steps=500)
    assert guarded.store.asked == [(5, 4)]


@pytest.mark.parametrize(("before", "now"), [(5, 3.6), (5, 5), (1, 8)])
def test_a_version_that_drafts_as_well_stays(before, now):
    guarded = Guarded()
    guarded.swap(1)
    guarded.run(before)
    guarded.swap(2)
    guarded.run(now, row_steps=300)
    assert (guarded.store.asked, guarded.rollbacks) == ([], 0)


def test_what_falls_later_than_the_first_window_is_for_alerts():
    guarded = Guarded()
    guarded.swap(1)
    guarded.run(5)
    guarded.swap(2)
    guarded.run(5)
    guarded.run(1, row_steps=1000)
    assert guarded.store.asked == []


def test_going_back_is_not_judged_in_turn():
    guarded = Guarded()
    guarded.swap(4)
    guarded.run(5)
    guarded.swap(5)
    guarded.run(2)
    guarded.swap(4)  # what the roll-back brings
    guarded.run(1, row_steps=300)
    assert guarded.store.asked == [(5, 4)]
    guarded.swap(5)  # by hand
    guarded.run(0.2, row_steps=300)
    assert guarded.store.current == 5, "who brings it back has the last word"
    assert guarded.rollbacks == 1


def test_without_evidence_of_before_nothing_is_judged():
    guarded = Guarded()
    guarded.guard.swapped(None)
    guarded.run(5)
    guarded.swap(1)
    guarded.run(5, row_steps=50)
    guarded.swap(2)
    guarded.run(1, row_steps=300)
    assert guarded.store.asked == []


def test_a_version_in_use_for_a_moment_is_no_measure():
    guarded = Guarded()
    guarded.swap(1)
    guarded.run(5)
    guarded.swap(2)
    guarded.run(1, row_steps=50)
    guarded.swap(3)
    guarded.run(1)
    assert guarded.store.asked == [(3, 1)]


def test_it_can_be_turned_off():
    guarded = Guarded(drop=0.0)
    guarded.swap(1)
    guarded.run(5)
    guarded.swap(2)
    guarded.run(0.2)
    assert guarded.store.asked == []


def test_a_store_that_is_away_is_asked_again_and_one_that_lost_the_version_is_not(caplog):
    guarded = Guarded()
    guarded.swap(1)
    guarded.run(5)
    guarded.swap(2)
    guarded.store.fault = StoreError("away")
    with pytest.raises(StoreError):
        guarded.run(1)
    guarded.store.fault = UnknownVersion("no index version 1")
    guarded.guard.act()
    assert "stays in use: no index version 1" in caplog.text
    guarded.guard.act()
    assert len(guarded.store.asked) == 2
    assert guarded.rollbacks == 0


def test_replicas_that_fall_together_go_back_once():
    store = Store()
    replicas = [Guarded(store) for _ in range(4)]
    for version, tokens_per_step in ((1, 5), (2, 1)):
        for replica in replicas:
            replica.swap(version)
            store.current = version
        for replica in replicas:
            replica.run(tokens_per_step)
    assert store.current == 1
    assert sum(r.rollbacks for r in replicas) == 1


def test_what_is_expected_is_told_where_it_is_known():
    guarded = Guarded()
    guarded.guard.swapped(None)
    assert guarded.forecast is None
    guarded.swap(1, forecast=4.5)
    assert guarded.forecast == 4.5
    guarded.swap(2)
    assert guarded.forecast is None


def test_when_an_index_was_built_is_told_while_there_is_one():
    guarded = Guarded()
    built = "tasc_draft_index_built_timestamp_seconds"
    for artifact, told in ((None, None), (Artifact("t", "f", 1, 1, "0", 1, 1, 1e9), 1e9)):
        guarded.guard.swapped(artifact)
        assert guarded.registry.get_sample_value(built, LABELS) == told
    guarded.guard.swapped(None)
    assert guarded.registry.get_sample_value(built, LABELS) is None


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), min_size=1, max_size=200),
    st.integers(10, 60),
)
def test_a_window_holds_the_newest_forwards_and_few_more(steps, wanted):
    window = DriftWindow(wanted)
    for tokens, row_steps in steps:
        window.add(tokens, row_steps)
    total = sum(n for _, n in steps)
    assert window.full == (total >= wanted)
    tails = [steps[i:] for i in range(len(steps))]
    efficiencies = {
        sum(t for t, _ in tail) / n
        for tail in tails
        if min(total, wanted) <= (n := sum(n for _, n in tail)) <= wanted + wanted / 20 + 8 and n
    }
    assert window.tokens_per_step in efficiencies or total == 0


@pytest.mark.parametrize("judged", [0, 50, 95])
def test_another_target_or_proposer_while_an_index_is_judged_is_no_fault_of_the_index(judged):
    guarded = Guarded()
    guarded.swap(4)
    guarded.run(5)
    guarded.swap(5)
    guarded.run(5, row_steps=judged)
    guarded.swap(5)  # the record has changed, and with it who answers or drafts
    guarded.run(2, row_steps=300)
    assert guarded.store.asked == []
    guarded.swap(6)
    guarded.run(1)
    assert guarded.store.asked == [(6, 5)], "judged by what the change brought"
