"""The benchmark of ten tasks as a user runs it, on a few rows."""

import pytest
from scripts import record, run


@pytest.mark.slow("benchmark smoke")
def test_drafts_save_forwards_of_labels_and_change_no_answer() -> None:
    few = ["--warm", "16", "--rows", "16", "--repeats", "2"]
    found = record(run("pays/bench_pays.py", "--tasks", "labels, matching; slots, no", *few))
    tasks = found["tasks"]
    assert set(tasks) == {"labels, matching corpus", "slots, no corpus"}
    for task in tasks.values():
        assert task["same_texts"] == task["rows"] == 32
        assert task["forwards_per_answer"] < task["plain_forwards_per_answer"]
        assert 0 < task["accepted"] <= task["drafted"]
    assert tasks["labels, matching corpus"]["plain_forwards_per_answer"] < 2.5
    assert len(found["figures"]) == 2
