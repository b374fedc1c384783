"""The paper's test of entropy, on runs whose outcome is known."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasc_jobs.errors import FileError
from tasc_jobs.forecast_ft.check import EXAMPLE, MeasuredRun, check, read_runs
from tasc_jobs.forecast_ft.page import check_page


def run(budget: int, bits: float, ms: float, steps: float | None = None, of: str = "a") -> Any:
    return {
        "setting": of, "budget": budget, "renyi2_bits": bits, "ms_per_answer": ms,
        "steps_per_answer": steps, "quality": {"ignored": 1},
    }  # fmt: skip


def write(path: Path, *runs: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, runs)) + "\n\n")
    return path


def test_entropy_that_tells_all_has_tau_minus_one(tmp_path: Path) -> None:
    file = write(tmp_path / "f", run(60, 5, 7, 4), run(0, 4, 9, 8), run(125, 6, 6, 3))
    (found,) = check(read_runs(file)).settings
    assert (found.runs, found.lines, found.tau, found.tau_steps) == (3, 3, -1, -1)
    assert (found.rises, found.right) == (2, 2)


def test_settings_are_judged_by_themselves_and_averaged(tmp_path: Path) -> None:
    right = [run(0, 1, 9), run(60, 2, 8), run(125, 3, 7)]
    wrong = [run(0, 1, 7, of="b"), run(60, 2, 8, of="b"), run(125, 3, 9, of="b")]
    found = check(read_runs(write(tmp_path / "f", *right, *wrong)))
    assert [each.tau for each in found.settings] == [-1, 1]
    assert found.mean_tau == 0
    assert found.right_share == 0.5
    assert found.mean_tau_steps is None
    assert found.as_json["runs"] == 6
    assert len(check_page(found).tables[0].rows) == 2


def test_several_runs_of_a_budget_are_one_by_their_medians() -> None:
    runs = [run(0, 1, 9), run(60, 2, 8), run(60, 2, 100), run(60, 2, 7)]
    checked = check([MeasuredRun(**each) for each in runs])
    (found,) = checked.settings
    assert (found.runs, found.lines, found.tau) == (2, 4, -1)
    assert (checked.as_json["runs"], checked.as_json["lines"]) == (2, 4)


def test_one_budget_alone_says_nothing() -> None:
    found = check([MeasuredRun(**run(0, 1, 9))])
    assert (found.mean_tau, found.right_share) == (None, None)
    assert check_page(found).summary[0].count("unknown") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 1 of .* is no run .*Invalid JSON"),
        ("{}", "setting: Field required; budget: Field required"),
        (json.dumps(run(0, 1, 9) | {"renyi2_bits": None}), "renyi2_bits.*--train"),
        (json.dumps(run(0, 1, -1)), "ms_per_answer: Input should be greater than 0"),
        (json.dumps(run(0, float("nan"), 1)), "renyi2_bits"),
    ],
)
def test_a_line_that_is_no_run_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "f").write_text(line)
    with pytest.raises(FileError, match=said):
        read_runs(tmp_path / "f")


def test_a_file_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read runs"):
        read_runs(tmp_path / "none")
    (tmp_path / "f").write_text("\n")
    with pytest.raises(FileError, match="has no runs"):
        read_runs(tmp_path / "f")


def test_the_example_is_a_run() -> None:
    assert MeasuredRun.model_validate_json(EXAMPLE).budget == 60
