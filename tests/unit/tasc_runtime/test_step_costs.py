"""Tests that costs are measured at the first start and read later, separately by engine."""

import fcntl
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support import eventually
from tasc_engine import EngineConfig, ModelSource, Target
from tasc_engine.step.cost import Conditions, Effort
from tasc_runtime.engine import step_costs as module
from tasc_runtime.engine.step_costs import step_costs
from tiny import make_folder


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of measured engines; a measurement takes no time."""
    rows: list[int] = []

    def measure(target: Target, model: str, seconds: float, effort: Effort):
        rows.append(target.config.rows)
        return honest(target, model, seconds=0.0, effort=effort)

    honest = module.measure
    monkeypatch.setattr(module, "measure", measure)
    return rows


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource(make_folder(tmp_path / "model"))


def target_of(source: ModelSource, rows: int) -> Target:
    return Target.load(source, EngineConfig(rows=rows, max_model_len=64))


def test_costs_of_each_kind_of_engine_are_measured_once(tmp_path, source, measured) -> None:
    found, messages = [], list[str]()
    for rows in (1, 2, 2, 1):
        target = target_of(source, rows)
        found.append(step_costs(target, source, tmp_path / "costs", messages.append)[0])
    assert measured == [1, 2]
    assert found[1] == found[2]
    assert found[0] == found[3] != found[1]
    files = {str(path) for path in (tmp_path / "costs").glob("*.json")}
    assert len(files) == 2
    assert {text.split(" read ")[1] for text in messages} == files
    assert len(messages) == 2


def test_costs_are_measured_for_each_number_of_threads(tmp_path, source, measured) -> None:
    target, before = target_of(source, 1), torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            costs, _ = step_costs(target, source, tmp_path / "costs")
            assert costs.measured.threads == threads
    finally:
        torch.set_num_threads(before)
    assert measured == [1, 1]


def test_corrected_costs_are_read_at_the_next_start(tmp_path, source, measured) -> None:
    target = target_of(source, 1)
    costs, keep = step_costs(target, source, tmp_path / "costs")
    slower = tuple(replace(c, seconds=2 * c.seconds) for c in costs.costs)
    corrected = replace(costs, costs=slower, measured=Conditions(real_steps=4096))
    keep(corrected)
    eventually(lambda: step_costs(target, source, tmp_path / "costs")[0] == corrected)
    assert measured == [1]


def test_wait_for_another_measurement_is_reported_once(tmp_path, source, monkeypatch, measured):
    monkeypatch.setattr(module, "WAIT_S", 0.4)
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    target, messages = target_of(source, 1), list[str]()
    with (tmp_path / "measuring.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        step_costs(target, source, tmp_path, messages.append)
    step_costs(target, source, tmp_path, messages.append)
    assert (len(messages), measured) == (2, [1])
    assert messages[0].startswith("waiting: another process measures step costs on ")
