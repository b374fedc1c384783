"""`tasc measure-cost` writes what `tasc forecast --step-cost` reads."""

import json
import re
from pathlib import Path

import pytest

from tasc_jobs.errors import JobError
from tasc_jobs.measure_cost import CostJob, in_words, measure_cost
from tasc_jobs.tuning.cost_file import read_cost_file
from tiny import make_folder


def job(folder: Path, **settings: object) -> CostJob:
    return CostJob(str(folder), device="cpu", rows=4, max_model_len=64, **settings)


def test_a_forecast_reads_what_was_measured(tmp_path: Path) -> None:
    costs = measure_cost(job(make_folder(tmp_path / "model")))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.as_json()))
    for rows in (1, 2, 4):
        curve = read_cost_file(path).curve(rows, context=20)
        assert curve.tokens[0] == rows
        assert curve.plain > 0
    said = in_words(costs)
    assert re.search(r"b =   4, context +\d+; by draft tokens a row  0: [\d.]+, 1: ", said)


@pytest.mark.parametrize(
    ("settings", "words"), [({"dtype": "int8"}, "dtype is int8"), ({}, "cannot load")]
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(JobError, match=words):
        measure_cost(job(tmp_path, **settings))
