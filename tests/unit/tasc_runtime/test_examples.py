"""Tests that each script of `examples` does what its first line describes, on the shipped model."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ALARM = "intent: alarm_set, slot fills: {time: "
PRINTED = {
    "generate": [f"{ALARM}nine am, date: friday}}", "forward passes"],
    "stream": [f"{ALARM}two hours"],
    "guided_choice": ["friday: intent: alarm_set (", "jazz: intent: play_music ("],
    "classify": ["calibration error: ", "intent: play_music (intent: play_music ", "at most"],
    "own_corpus": ["same answers: True", "forward passes: "],
    "adapters": ["DET NOUN ", "intent: play_music, slot fills: {"],
}
ON_RAY = {"object_store", "ray_data"}  # the tests of jobs run them, on their Ray


def test_every_example_is_tested_and_short() -> None:
    scripts = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == PRINTED.keys() | ON_RAY
    assert all(len(lines) <= 25 for lines in scripts.values())


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_its_results(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    out = capsys.readouterr().out
    for text in PRINTED[name]:
        assert text in out
