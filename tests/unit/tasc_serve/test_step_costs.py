"""Costs are measured at the first start and read at the next; another engine has others."""

from pathlib import Path

import pytest

from tasc_engine import EngineConfig, ModelSource, Target
from tasc_serve import step_costs as module
from tasc_serve.step_costs import step_costs
from tiny import make_folder


def test_each_kind_of_engine_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource(make_folder(tmp_path / "model"))
    measured: list[int] = []

    def measure(target: Target, model: str):
        measured.append(target.config.rows)
        return honest(target, model, seconds=0.0)

    honest = module.measure
    monkeypatch.setattr(module, "measure", measure)
    found = []
    for rows in (1, 2, 2, 1):
        target = Target.load(source, EngineConfig(rows=rows, max_model_len=64))
        found.append(step_costs(target, source, tmp_path / "costs"))
    assert measured == [1, 2]
    assert found[1] == found[2]
    assert found[0] == found[3] != found[1]
    assert len(list((tmp_path / "costs").glob("*.json"))) == 2
