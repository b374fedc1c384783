"""The demo's own parts: what it takes for right, and how it reads counters."""

import pytest

from tasc_jobs.demo.measure import Counters
from tasc_jobs.demo.tasks import TASKS, read_split
from tasc_jobs.evaluate.quality import intent_quality, tagging_accuracy


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
