"""Calibration of label probabilities: the fitted temperature, and how reliability is measured."""

from dataclasses import replace

import numpy as np
import pytest

import tiny
from tasc_protocol import FieldError
from tasc_runtime.engine.calibration import Judged, Reliability, calibrated, fitted
from tasc_runtime.llm import LLM
from tasc_store import TaskRecord

CHOICES = ["alarm set", "play music", "time"]


def rows_with(temperature: float, n: int = 4000) -> list[Judged]:
    """Makes rows whose right labels are drawn with the given temperature."""
    chance = np.random.default_rng(5)
    rows = []
    for logits in chance.normal(0, 3, (n, 4)):
        logprobs = np.sort(logits - np.logaddexp.reduce(logits))[::-1]
        shares = np.exp(logprobs / temperature)
        rows.append(Judged(logprobs, int(chance.choice(4, p=shares / shares.sum()))))
    return rows


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_of_the_rows_is_found(temperature):
    rows = rows_with(temperature)
    assert fitted(rows) == pytest.approx(temperature, rel=0.1)
    found = calibrated(rows)
    assert found.after.error < 0.02
    assert found.rows == len(rows)
    assert found.before.accuracy == found.after.accuracy
    if temperature != 1:
        assert found.after.error < found.before.error / 2
        assert found.after.brier < found.before.brier


def test_reliability_of_known_rows():
    sure, unsure = np.log([0.9, 0.1]), np.log([0.6, 0.3, 0.1])
    rows = [Judged(sure, 0), Judged(sure, 1), Judged(unsure, 0), Judged(unsure, 2)]
    found = Reliability.of([(row, 1.0) for row in rows])
    assert found.accuracy == 0.5
    assert found.error == pytest.approx((2 * abs(0.9 - 0.5) + 2 * abs(0.6 - 0.5)) / 4)
    brier = [0.02, 1.62, 0.16 + 0.09 + 0.01, 0.36 + 0.09 + 0.81]
    assert found.brier == pytest.approx(sum(brier) / 4)
    at = {each.threshold: each for each in found.thresholds}
    assert (at[0.7].coverage, at[0.7].accuracy) == (0.5, 0.5)
    assert (at[0.99].coverage, at[0.99].accuracy) == (0.0, None)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="49 rows"):
        calibrated(rows_with(1.0, 49))


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("sure", [0.6, 1 - 1e-15])
def test_rows_that_are_all_right_or_all_wrong_determine_no_temperature(right, sure):
    with pytest.raises(ValueError, match="do not determine"):
        calibrated([Judged(np.log([sure, 1 - sure]), right)] * 60)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny.make_folder(tmp_path_factory.mktemp("calibrated"), sharpness=1.0)
    prompt = "say {input} now"
    sizes = {"dtype": "float64", "cost_aware": False, "max_model_len": 256}
    return LLM(folder, choices=CHOICES, template=prompt, **sizes)


def test_calibration_is_used_for_the_choices_of_the_task_and_kept(llm, tmp_path):
    texts = [f"{text} {i}" for i in range(12) for text in tiny.SENTENCES]
    plain = llm.classify(texts, exact=True)
    rows = mostly_right(texts, plain)
    found = llm.calibrate(rows)
    temperature = llm.record.label_temperature
    assert temperature == found.temperature != 1
    after = llm.classify(texts, exact=True)
    for one, other in zip(plain, after, strict=True):
        scaled = {k: v ** (1 / temperature) for k, v in one.probabilities.items()}
        total = sum(scaled.values())
        assert dict(other.probabilities) == pytest.approx({k: v / total for k, v in scaled.items()})
    own_labels = llm.classify(texts, CHOICES, exact=True)
    assert [dict(one.probabilities) for one in own_labels] == [
        pytest.approx(dict(one.probabilities)) for one in plain
    ]
    for one, exact in zip(llm.classify(texts), after, strict=True):  # the bound holds, calibrated
        for label in CHOICES:
            share = one.probabilities.get(label, 0.0)
            assert abs(share - exact.probabilities[label]) <= one.unseen_mass + 1e-9
    divided = llm.classify(texts[:4], prior="empty")  # without the temperature
    own = llm.classify(texts[:4], CHOICES, prior="empty")
    for one, other in zip(divided, own, strict=True):
        assert sum(one.probabilities.values()) == pytest.approx(1)
        assert dict(one.probabilities) == pytest.approx(dict(other.probabilities))
    llm.save(tmp_path / "task")
    again = LLM.load(tmp_path / "task").classify(texts, exact=True)
    assert [one.probability for one in again] == [one.probability for one in after]


def mostly_right(texts, found):
    """Makes rows whose labels are mostly the model's."""
    labels = [CHOICES[i % 3] if i % 4 == 0 else one.label for i, one in enumerate(found)]
    return list(zip(texts, labels, strict=True))


def test_outputs_that_are_no_choice_are_refused(llm):
    texts = [f"{text} {i}" for i in range(12) for text in tiny.SENTENCES]
    rows = [
        (text, f"{label}, and more, so")
        for text, label in mostly_right(texts, llm.classify(texts, end=",", exact=True))
    ]
    with pytest.raises(FieldError, match="and more"):
        llm.calibrate(rows)
    assert llm.calibrate(rows, end=",").rows == len(rows)
    assert llm.record.label_end == ","


def record(**fields: object) -> TaskRecord:
    made = TaskRecord("task", "model", "0" * 16, "{input}", choices=("a", "b"))
    return replace(made, **fields)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"adapter": "other"},
        {"dtype": "bfloat16"},
        {"template": "x {input}"},
        {"choices": ("a", "c")},
        {"label_end": ""},
    ],
)
def test_a_calibration_is_refused_for_another_model_prompt_or_label_set(change):
    fitted_for = record()
    made = replace(fitted_for, label_temperature=1.5, calibrated_for=fitted_for.scoring_fingerprint)
    assert TaskRecord.from_json(made.to_json()) == made
    assert replace(made, max_tokens=7).label_temperature == 1.5
    with pytest.raises(ValueError, match=r"1\.5"):
        replace(made, **change)
    assert replace(made, **change, label_temperature=None).label_temperature is None


def test_an_empty_end_is_kept():
    made = record(label_end="")
    assert TaskRecord.from_json(made.to_json()).label_end == ""
    assert TaskRecord.from_json(record(abstain_below=0.5).to_json()).abstain_below == 0.5
