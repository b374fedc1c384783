"""A worker leaves tasks alone that its engines fail at, longer each time, and gives up at last."""

import pytest

from tasc_jobs.errors import ClusterError
from tasc_jobs.worker.rests import Rests


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_task_rests_twice_as_long_at_each_fault_and_a_minute_at_most() -> None:
    clock = Clock()
    rests = Rests(10, 5.0, clock)
    pauses = []
    for _ in range(6):
        pauses.append(rests.failed("a", "why"))
        assert rests.resting == ["a"]
        clock.now += pauses[-1]
        assert rests.resting == []
    assert pauses == [5, 10, 20, 40, 60, 60]


def test_one_task_that_works_keeps_the_worker_and_leaves_the_others_at_rest() -> None:
    clock = Clock()
    rests = Rests(3, 5.0, clock)
    pauses = []
    for _ in range(5):
        pauses.append(rests.failed("a", "why"))
        rests.failed("b", "why")
        rests.worked("b")
        assert rests.resting[0] == "a"
        clock.now += 100
    assert pauses == [5, 10, 20, 40, 60]


def test_so_many_faults_in_a_row_are_too_many_whatever_their_tasks() -> None:
    rests = Rests(3, 5.0, Clock())
    rests.failed("a", "why")
    rests.failed("b", "why")
    with pytest.raises(ClusterError, match=r"3 times in a row \(--max-faults\).*task c: no disk"):
        rests.failed("c", "no disk")
