"""Calibration of label probabilities: the fitted temperature, and how reliability is measured."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

import tiny
from tasc_protocol import FieldError
from tasc_runtime.engine.calibration import (
    MOST_SCORES,
    Reliability,
    Scored,
    calibrated,
    fitted,
    require_fitting,
)
from tasc_runtime.llm import LLM
from tasc_store import TaskRecord

CHOICES = ["alarm set", "play music", "time"]


NO_BIASES = (0.0, 0.0, 0.0, 0.0)


def rows_with(temperature: float, n: int = 4000, biases: Sequence[float] = NO_BIASES) -> Scored:
    """Makes rows whose right labels are drawn with the given temperature and biases."""
    chance = np.random.default_rng(5)
    logits = chance.normal(0, 3, (n, 4))
    shares = np.exp(logits / temperature + np.array(biases))
    below = (shares / shares.sum(1, keepdims=True)).cumsum(1)
    right = (chance.random((n, 1)) > below[:, :3]).sum(1)
    return Scored(logits - np.logaddexp.reduce(logits, 1, keepdims=True), right)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_of_the_rows_is_found(temperature):
    rows = rows_with(temperature)
    assert fitted(rows).temperature == pytest.approx(temperature, rel=0.1)
    found = calibrated(rows)
    assert found.after.error < 0.02
    assert found.rows == len(rows.right)
    assert np.abs(found.biases or 0).max() < 0.1
    if temperature != 1:
        assert found.after.error < found.before.error / 2
        assert found.after.brier < found.before.brier


@pytest.mark.parametrize(
    ("temperature", "biases"),
    [(2.0, (1.5, -1.5, 0.5, -0.5)), (1.0, (6.0, -6.0, 2.0, -2.0)), (0.4, (-3.0, 3.0, 0.0, 0.0))],
)
def test_biases_of_the_rows_are_found_where_they_help(temperature, biases):
    rows = rows_with(temperature, biases=biases)
    fit, only = fitted(rows, biased=True), fitted(rows)
    assert fit.temperature == pytest.approx(temperature, rel=0.15)
    assert fit.biases - fit.biases.mean() == pytest.approx(np.array(biases), abs=1.2)
    assert rows.loss(fit) < rows.loss(only) - 0.1
    found = calibrated(rows)
    assert found.biases == tuple(fit.biases.tolist())
    assert found.after.accuracy > found.before.accuracy
    assert found.after.error < 0.02


def test_fit_is_at_the_least_loss():
    rows = rows_with(1.0, 400, (6.0, -6.0, 2.0, -2.0))
    found = fitted(rows, biased=True)
    shares = np.exp(found.log_shares(rows.logprobs))
    shares[np.arange(400), rows.right] -= 1
    assert np.abs(shares.sum(axis=0) + found.biases).max() < 1e-3
    assert abs((shares * rows.logprobs).sum()) < 1e-2


def test_rows_whose_labels_are_all_wrong_without_biases_are_calibrated():
    chance = np.random.default_rng(0)
    right = chance.integers(0, 2, 400)
    logits = np.where(right == 1, 1.0, -1.0) + chance.normal(0, 1, 400) + 15
    rows = Scored(np.column_stack((np.zeros(400), logits)), right)
    found = calibrated(rows)
    assert len(found.biases) == 2
    assert found.before.accuracy < 0.6
    assert found.after.accuracy > 0.8


def test_few_rows_get_no_biases():
    assert calibrated(rows_with(2.0, 60)).biases == ()


def test_more_scores_than_memory_has_room_for_are_refused():
    require_fitting(100, MOST_SCORES // 100)
    with pytest.raises(ValueError, match="at most 500 rows"):
        require_fitting(501, MOST_SCORES // 500)


def test_a_label_without_rows_keeps_a_finite_bias():
    rows = rows_with(1.0)
    never = Scored(np.column_stack((rows.logprobs, np.full(len(rows.right), -2.0))), rows.right)
    found = fitted(never, biased=True).biases
    assert np.isfinite(found).all()
    assert found.argmin() == 4


def test_probabilities_are_divided_by_those_of_an_empty_input():
    rows, prior = rows_with(2.0), np.log([0.7, 0.1, 0.1, 0.1])
    moved = Scored(rows.logprobs + prior, rows.right)
    found, expected = calibrated(moved, prior), calibrated(rows)
    assert found.temperature == pytest.approx(expected.temperature)
    assert found.after.error == pytest.approx(expected.after.error)
    assert found.after.brier == pytest.approx(expected.after.brier)
    moved_by = np.array(found.biases) - (np.array(expected.biases) if expected.biases else 0)
    assert moved_by == pytest.approx(-prior / found.temperature)


def test_reliability_of_known_rows():
    shares = np.array([[0.9, 0.1, 0.0], [0.1, 0.9, 0.0], [0.3, 0.6, 0.1], [0.3, 0.6, 0.1]])
    found = Reliability.of(shares, np.array([0, 0, 1, 2]))
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
    logprobs = np.log(np.tile([sure, 1 - sure], (60, 1)))
    with pytest.raises(ValueError, match="do not determine"):
        calibrated(Scored(logprobs, np.full(60, right)))


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
        added = dict(zip(CHOICES, llm.record.label_biases or (0.0,) * 3, strict=True))
        scaled = {
            k: v ** (1 / temperature) * np.exp(added[k]) for k, v in one.probabilities.items()
        }
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
    assert [one.probability for one in again] == [
        pytest.approx(one.probability, rel=1e-12) for one in after
    ]


def test_a_prior_is_kept_with_the_calibration(llm):
    texts = [f"{text} {i}" for i in range(12) for text in tiny.SENTENCES]
    divided = llm.classify(texts, CHOICES, prior="empty", exact=True)
    plain = llm.classify(texts, CHOICES, exact=True)
    (empty,) = llm.classify("", CHOICES, exact=True)
    for one, other in zip(plain, divided, strict=True):
        shares = {k: v / empty.probabilities[k] for k, v in one.probabilities.items()}
        total = sum(shares.values())
        assert dict(other.probabilities) == pytest.approx({k: v / total for k, v in shares.items()})
    for one, exact in zip(llm.classify(texts, CHOICES, prior="empty"), divided, strict=True):
        assert one.unseen_mass <= 0.001
        for label in CHOICES:
            share = one.probabilities.get(label, 0.0)
            assert abs(share - exact.probabilities[label]) <= one.unseen_mass + 1e-9
    found = llm.calibrate(mostly_right(texts, divided), prior="empty")
    assert llm.record.label_biases == found.biases != ()
    assert TaskRecord.from_json(llm.record.to_json()) == llm.record
    for one, other in zip(llm.classify(texts, exact=True), plain, strict=True):
        shares = {
            label: other.probabilities[label] ** (1 / found.temperature) * np.exp(bias)
            for label, bias in zip(CHOICES, found.biases, strict=True)
        }
        total = sum(shares.values())
        assert dict(one.probabilities) == pytest.approx({k: v / total for k, v in shares.items()})
    with pytest.raises(FieldError, match="uniform or empty"):
        llm.calibrate([], prior="none")


def test_a_label_can_stand_for_abstentions(llm):
    (found,) = llm.classify("x", CHOICES, abstain_below=1.0, abstain_label="unsure")
    assert (found.label, found.probability < 1) == ("unsure", True)
    (sure,) = llm.classify("x", CHOICES, abstain_label="unsure")
    assert sure.label in CHOICES


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
    biased = replace(made, label_biases=(0.5, -0.5), abstain_label="unsure")
    assert TaskRecord.from_json(biased.to_json()) == biased
    for wrong in ((0.5,), (0.5, float("nan")), 7, (0.5, "x")):
        with pytest.raises(ValueError, match="label_biases"):
            replace(made, label_biases=wrong)


def test_an_empty_end_is_kept():
    made = record(label_end="")
    assert TaskRecord.from_json(made.to_json()).label_end == ""
    assert TaskRecord.from_json(record(abstain_below=0.5).to_json()).abstain_below == 0.5
