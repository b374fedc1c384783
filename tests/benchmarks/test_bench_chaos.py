"""Tests which faults the chaos and soak benchmarks detect."""

from typing import Any

import pytest

from benchmarks.chaos.bench_soak import Options, faults
from benchmarks.chaos.clients import Question, Tally

QUESTION = Question({"model": "m", "prompt": "p"}, "right", 1)

ASKED = Options(1, 1, 1, 1, most_growth=2, most_files=3, most_slower=1.5)
REDIS = {"accepted_draft_tokens": 9, "said": ["degraded", "ready"], "ready_again_s": 0.5}
GOOD = {
    "failed": 0, "wrong": 0, "redis": REDIS, "growth": {"gateway 1": {"memory_mib": 1, "files": 3}},
    "ended": [], "p99_ms": [9.0, 10.0, 14.0],
}  # fmt: skip


def test_wrong_and_duplicated_answers_are_counted_and_shown() -> None:
    tally = Tally()
    for text in ("right", "wrong", "rightright"):
        tally.answered(QUESTION, text)
    assert (tally.requests, tally.wrong, tally.duplicated) == (3, 2, 1)
    assert len(tally.examples) == 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"failed": 1}, "requests failed"),
        ({"wrong": 1}, "answers were wrong"),
        ({"growth": {}}, "no process was seen"),
        ({"ended": ["gateway 1"]}, "processes ended"),
        ({"p99_ms": [30.0, 10.0, 16.0]}, "p99 rose"),
        ({"p99_ms": [30.0, 10.0, None]}, "p99 rose"),
        ({"growth": {"gateway 1": {"memory_mib": 2.5, "files": 0}}}, "memory grew"),
        ({"growth": {"gateway 1": {"memory_mib": 0, "files": 4}}}, "file handles grew"),
        ({"redis": REDIS | {"accepted_draft_tokens": 0}}, "no drafts without Redis"),
        ({"redis": REDIS | {"said": ["ready"]}}, "/readyz did not say degraded"),
        ({"redis": REDIS | {"ready_again_s": None}}, "/readyz did not say ready again"),
    ],
)
def test_each_fault_in_a_chaos_result_is_named_in_the_error(
    change: dict[str, Any], fault: str
) -> None:
    assert faults(GOOD, ASKED) == faults(GOOD | {"redis": None}, ASKED) == []
    assert faults(GOOD | change, ASKED) == [fault]
