"""Compare the entropy of output tokens with the measured times of fine-tuned models.

    python benchmarks/finetune/agreement.py runs.jsonl

TASC, appendix E: for runs that differ only in their token budget, the rank correlation of entropy
and time, and how often the time falls when the entropy rises. Each line of the file is one that
`tasc evaluate TASK --test FILE --setting NAME --json` prints. Runs with the same name are compared.
The last line of stdout is one JSON object.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # modules are found from the repository's root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.common import add_json, finish, parser_of, show_table


@dataclass(frozen=True)
class MeasuredRun:
    """The fields of an evaluation that are compared."""

    setting: str
    budget: int
    renyi2_bits: float
    ms_per_answer: float
    steps_per_answer: float

    @classmethod
    def of(cls, found: dict[str, Any]) -> "MeasuredRun":
        """Ignores other fields."""
        return cls(**{field.name: found[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Agreement:
    """The agreement of entropy and time in one setting's runs.

    Attributes:
        runs: Number of runs. Those of one budget count as one, with their medians; ``lines`` is
            the number of all lines.
        tau: Kendall's tau-b of entropy and time; None if all values of one of them are equal.
        tau_steps: Kendall's tau-b of entropy and decode steps.
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
    def right_share(self) -> float | None:
        """The share of all rises of entropy at which the time falls; None if there are none."""
        rises = sum(each.rises for each in self.settings)
        return sum(each.right for each in self.settings) / rises if rises else None

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "lines": sum(each.lines for each in self.settings),
            "mean_tau": _mean(each.tau for each in self.settings),
            "mean_tau_steps": _mean(each.tau_steps for each in self.settings),
            "right_share": self.right_share,
            "settings": [asdict(each) for each in self.settings],
        }


def check(runs: Sequence[MeasuredRun]) -> Check:
    """Compares each setting's runs in the order of their budgets."""
    by_setting: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    return Check(tuple(_agreement(setting, own) for setting, own in by_setting.items()))


def _agreement(setting: str, runs: Sequence[MeasuredRun]) -> Agreement:
    ordered = sorted(runs, key=lambda run: run.budget)
    budgets = [list(own) for _, own in groupby(ordered, key=lambda run: run.budget)]
    entropy, ms, steps = (
        [statistics.median(getattr(run, name) for run in own) for own in budgets]
        for name in ("renyi2_bits", "ms_per_answer", "steps_per_answer")
    )
    taus = kendall_tau(entropy, ms), kendall_tau(entropy, steps)
    return Agreement(setting, len(budgets), len(runs), *taus, *falls_at_rises(entropy, ms))


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Returns Kendall's tau-b, in [-1, 1] (Kendall 1945).

    It is the number of pairs in the same order minus the number in the opposite order, normalised
    with a correction for ties. None if a series has fewer than two different values.
    """
    x, y = (np.sign(np.subtract.outer(series, series)) for series in (one, other))
    norm = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / norm) if norm else None


def falls_at_rises(one: Sequence[float], other: Sequence[float]) -> tuple[int, int]:
    """Returns how often ``one`` rises between neighbours, and how often ``other`` then falls."""
    steps = zip(pairwise(one), pairwise(other), strict=True)
    falls = [after < before for (a, b), (before, after) in steps if b > a]
    return len(falls), sum(falls)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="file with the lines of evaluations")
    add_json(parser)
    options = parser.parse_args()
    lines = options.file.read_text("utf-8").splitlines()
    found = check([MeasuredRun.of(json.loads(line)) for line in lines if line.strip()])
    rows = [list(map(str, asdict(each).values())) for each in found.settings]
    show_table("Entropy and measured time", [field.name for field in fields(Agreement)], rows)
    finish({"benchmark": "agreement", **found.as_json}, options.json)


if __name__ == "__main__":
    main()
