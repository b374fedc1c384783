"""The demo's own parts: what it takes for right, and how it reads counters."""

import pytest

from tasc_jobs.demo.client import Counters
from tasc_jobs.evaluate.quality import intent_quality, tagging_accuracy
from tasc_jobs.demo.tasks import TASKS, read_split

RIGHT = [
    "intent: alarm_set, slot fills: {time: nine am, date: friday}",
    "intent: play, slot fills: {}",
]


def test_right_answers_score_one_on_every_measure() -> None:
    found = intent_quality(RIGHT, RIGHT)
    assert (found.intent_accuracy, found.slot_f1, found.joint_accuracy) == (1, 1, 1)


def test_a_wrong_slot_value_costs_the_slot_and_the_row_but_not_the_intent() -> None:
    wrong = ["intent: alarm_set, slot fills: {time: ten am, date: friday}", RIGHT[1]]
    found = intent_quality(wrong, RIGHT)
    assert found.intent_accuracy == 1
    assert found.slot_f1 == pytest.approx(0.5)
    assert found.joint_accuracy == 0.5


def test_an_unreadable_answer_has_no_intent_and_no_slots() -> None:
    found = intent_quality(["nonsense", RIGHT[1]], RIGHT)
    assert (found.intent_accuracy, found.slot_f1) == (0.5, 0.0)


def test_a_slot_that_occurs_twice_counts_twice() -> None:
    truth = "intent: a, slot fills: {x: one, x: one}"
    once = intent_quality(["intent: a, slot fills: {x: one}"], [truth])
    assert once.slot_f1 == pytest.approx(2 / 3)
    assert once.joint_accuracy == 0


def test_a_value_may_hold_a_comma() -> None:
    truth = "intent: a, slot fills: {x: one, two, y: three}"
    assert intent_quality([truth], [truth]).slot_f1 == 1
    assert intent_quality(["intent: a, slot fills: {x: one, y: three}"], [truth]).slot_f1 == 0.5


def test_tags_are_compared_by_position() -> None:
    assert tagging_accuracy(["A B C"], ["A B C"]) == 1
    assert tagging_accuracy(["A C"], ["A B C D"]) == 0.25
    assert tagging_accuracy(["A B C D E"], ["A B"]) == 1


@pytest.mark.parametrize("task", TASKS)
def test_shipped_truth_scores_as_right(task: str) -> None:
    truth = [r["output"] for r in read_split(task, "test")]
    assert len(truth) > 2000
    if task == "massive_en":
        assert intent_quality(truth, truth).joint_accuracy == 1
        assert intent_quality(truth, truth).slot_f1 == 1
    else:
        assert tagging_accuracy(truth, truth) == 1


def test_counters_subtract_and_add_by_position() -> None:
    before = Counters(10, 20, 5, 15, [4.0], [2.0])
    after = Counters(14, 30, 9, 21, [7.0, 3.0], [4.0, 1.0])
    gained = after.since(before)
    assert gained == Counters(4, 10, 4, 6, [3.0, 3.0], [2.0, 1.0])
    assert before.plus(gained) == after
    assert gained.block_efficiency == 2.5
    assert gained.acceptance_by_position == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
