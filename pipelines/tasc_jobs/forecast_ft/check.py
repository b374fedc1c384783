"""Tests forecasts: checks whether entropy predicts the time of fine-tuned models.

TASC, appendix E: for runs that differ only in their token budget, the rank correlation of entropy
and time, and how often the time falls when the entropy rises.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, groupby, pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasc_jobs.report.document import ReportDocument, Table
from tasc_runtime.engine_settings import fault_of
from tasc_runtime.errors import FileError


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Returns Kendall's tau-b, in [-1, 1] (Kendall 1945).

    It is the number of pairs in the same order minus the number in the opposite order, normalised
    with a correction for ties. None if a series has fewer than two different values.
    """
    same = opposite = apart_one = apart_other = 0
    for (a, x), (b, y) in combinations(zip(one, other, strict=True), 2):
        apart_one += a != b
        apart_other += x != y
        same += (a < b and x < y) or (a > b and x > y)
        opposite += (a < b and x > y) or (a > b and x < y)
    if not apart_one or not apart_other:
        return None
    return (same - opposite) / math.sqrt(apart_one * apart_other)


def falls_at_rises(one: Sequence[float], other: Sequence[float]) -> tuple[int, int]:
    """Returns how often ``one`` rises between neighbours, and how often ``other`` then falls."""
    steps = list(zip(pairwise(one), pairwise(other), strict=True))
    rises = [after < before for (a, b), (before, after) in steps if b > a]
    return len(rises), sum(rises)


EXAMPLE = (
    '{"setting": "massive_en, n_max 4", "budget": 60, "renyi2_bits": 5.31, "ms_per_answer": 12.6}'
)


class MeasuredRun(BaseModel):
    """A line of `tasc evaluate --json`, or one with these fields; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    setting: str
    budget: int = Field(ge=0)
    renyi2_bits: float = Field(ge=0, allow_inf_nan=False)
    ms_per_answer: float = Field(gt=0, allow_inf_nan=False)
    steps_per_answer: float | None = Field(None, gt=0, allow_inf_nan=False)


@dataclass(frozen=True)
class Agreement:
    """The agreement of entropy and time in one setting's runs.

    Attributes:
        runs: Number of runs. Those of one budget count as one, with their medians; ``lines`` is
            the number of all lines.
        tau: Kendall's tau-b of entropy and time; None if all values of one of them are equal.
        tau_steps: Kendall's tau-b of entropy and decode steps; also None if the steps of a budget
            are unknown.
        rises: Number of runs with more entropy than at the next smaller budget; ``right`` of them
            took less time.
    """

    setting: str
    runs: int
    lines: int
    tau: float | None
    tau_steps: float | None
    rises: int
    right: int


@dataclass(frozen=True)
class Check:
    """The agreement in all settings."""

    settings: tuple[Agreement, ...]

    @property
    def runs(self) -> int:
        """Number of runs that differ in their setting or their budget."""
        return sum(each.runs for each in self.settings)

    @property
    def mean_tau(self) -> float | None:
        return _mean(each.tau for each in self.settings)

    @property
    def mean_tau_steps(self) -> float | None:
        return _mean(each.tau_steps for each in self.settings)

    @property
    def right_share(self) -> float | None:
        """The share of all rises of entropy at which the time falls; None if there are none."""
        rises = sum(each.rises for each in self.settings)
        return sum(each.right for each in self.settings) / rises if rises else None

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "lines": sum(each.lines for each in self.settings),
            "mean_tau": self.mean_tau,
            "mean_tau_steps": self.mean_tau_steps,
            "right_share": self.right_share,
            "settings": [asdict(each) for each in self.settings],
        }


def read_runs(path: Path) -> list[MeasuredRun]:
    """Returns the runs of a file of JSON lines.

    Raises:
        FileError: The file cannot be read, has no runs, or a line is not a run.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read runs from {path}: {error}") from error
    found = [_run(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise FileError(f"{path} has no runs; a line is {EXAMPLE}")
    return found


def check(runs: Sequence[MeasuredRun]) -> Check:
    """Evaluates each setting's runs in the order of their budgets."""
    by_setting: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    return Check(tuple(_agreement(setting, own) for setting, own in by_setting.items()))


def _agreement(setting: str, runs: Sequence[MeasuredRun]) -> Agreement:
    ordered = sorted(runs, key=lambda run: run.budget)
    points = [list(own) for _, own in groupby(ordered, key=lambda run: run.budget)]
    entropy = [statistics.median(run.renyi2_bits for run in own) for own in points]
    ms = [statistics.median(run.ms_per_answer for run in own) for own in points]
    rises, right = falls_at_rises(entropy, ms)
    return Agreement(
        setting,
        len(points),
        len(runs),
        kendall_tau(entropy, ms),
        _tau_steps(entropy, points),
        rises,
        right,
    )


def _tau_steps(entropy: Sequence[float], points: Sequence[Sequence[MeasuredRun]]) -> float | None:
    steps: list[float] = []
    for own in points:
        said = [run.steps_per_answer for run in own if run.steps_per_answer is not None]
        if not said:
            return None
        steps.append(statistics.median(said))
    return kendall_tau(entropy, steps)


def _run(path: Path, number: int, line: str) -> MeasuredRun:
    try:
        return MeasuredRun.model_validate_json(line)
    except ValidationError as error:
        raise FileError(
            f"line {number} of {path} is no run ({fault_of(error)}); `tasc evaluate --json` with "
            f"the rows of --train writes such lines, as in {EXAMPLE}"
        ) from error


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def check_page(found: Check) -> ReportDocument:
    """Returns the report on how well entropy predicted the times of measured runs."""
    share = found.right_share
    if share is None:
        right = "no setting has two budgets of different entropy, and with fewer there is no rank"
    else:
        right = f"time falls at {100 * share:.0f} % of the rises of entropy"
    return ReportDocument(
        "Entropy and measured time",
        (
            f"mean tau of entropy and time {_tau(found.mean_tau)}, of entropy and steps "
            f"{_tau(found.mean_tau_steps)}",
            right,
        ),
        (Table.of("Kendall's tau by setting", map(_check_row, found.settings)),),
        (),
    )


def _check_row(each: Agreement) -> dict[str, str]:
    return {
        "setting": each.setting,
        "runs": str(each.runs),
        "lines": str(each.lines),
        "tau, H2 and time": _tau(each.tau),
        "tau, H2 and steps": _tau(each.tau_steps),
        "H2 rises": str(each.rises),
        "time falls": str(each.right),
    }


def _tau(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.3f}"
