"""Tests the comparison of entropy and measured times: rank correlation, medians and rises."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import record, run

from benchmarks.finetune.agreement import MeasuredRun, check, falls_at_rises, kendall_tau


def line(budget: int, bits: float, ms: float, steps: float = 1.0, of: str = "a") -> Any:
    return {
        "setting": of, "budget": budget, "renyi2_bits": bits, "ms_per_answer": ms,
        "steps_per_answer": steps, "quality": {"ignored": 1},
    }  # fmt: skip


def test_each_setting_is_compared_on_its_own_and_the_mean_is_over_settings(tmp_path: Path) -> None:
    one = [line(60, 5, 7, 4), line(0, 4, 9, 8), line(125, 6, 6, 3)]
    other = [line(0, 1, 7, of="b"), line(60, 2, 8, of="b"), line(125, 3, 9, of="b")]
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join(map(json.dumps, one + other)) + "\n\n")
    found = record(run("finetune/agreement.py", file))
    settings = [
        [each[name] for name in ("runs", "rises", "right", "tau", "tau_steps")]
        for each in found["settings"]
    ]
    assert settings == [[3, 2, 2, -1, -1], [3, 2, 0, 1, None]]
    assert [found[name] for name in ("runs", "mean_tau", "right_share")] == [6, 0, 0.5]


def test_runs_of_one_budget_count_once_with_their_medians() -> None:
    runs = [line(0, 1, 9), line(60, 2, 8), line(60, 2, 100), line(60, 2, 7)]
    (found,) = check(list(map(MeasuredRun.of, runs))).settings
    assert (found.runs, found.lines, found.tau) == (2, 4, -1)
    alone = check([MeasuredRun.of(line(0, 1, 9))]).as_json
    assert (alone["mean_tau"], alone["right_share"]) == (None, None)


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [
        ([1, 2, 3, 4, 5], [3, 4, 1, 2, 5], (6 - 4) / 10),  # six pairs in order, four against it
        ([1, 2, 3, 4], [9, 5, 3, 1], -1),
        ([1, 2, 3], [1, 4, 9], 1),
        ([1, 2, 2, 3], [1, 2, 3, 3], 4 / 5),  # four pairs in order, one tie in either
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),  # two pairs in order, one tie in the first alone
        ([1, 1, 1], [1, 2, 3], None),
        ([1], [2], None),
    ],
)
def test_kendall_tau_equals_values_computed_by_hand(
    one: list[int], other: list[int], tau: float | None
) -> None:
    assert kendall_tau(one, other) == pytest.approx(tau)
    assert kendall_tau(other, one) == pytest.approx(tau)


def test_only_rises_are_counted_and_only_falls_are_right() -> None:
    entropy, ms = [1, 2, 3, 2.5, 4, 4], [9, 7, 8, 1, 1, 0]
    # Rises 1 -> 2 (falls), 2 -> 3 (rises), 2.5 -> 4 (stays).
    assert falls_at_rises(entropy, ms) == (3, 1)
