"""Tests an evaluation of a tiny model, end to end, with equal answers with and without drafts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from finetuning import Made
from support import refused
from tasc_engine import ModelSource
from tasc_jobs.demo.tasks import ADAPTERS, MODEL, TASK, TEMPLATES, read_split
from tasc_jobs.errors import EmptyCorpusError, JobError, UsageError
from tasc_protocol import GuideSpec
from tasc_runtime.engine.calibration import Calibration
from tasc_runtime.llm import LLM
from tasc_runtime.sampling_options import guide_of
from tasc_store import CorpusRow
from tasc_text import PromptTemplate, TaskTokenizer
from tasc_train.evaluate.evaluation import STAGES, Evaluation, evaluate, evaluation_page
from tasc_train.evaluate.measured_model import (
    GenerationSettings,
    MeasuredModel,
    Run,
    Setup,
    Side,
    answer,
)

TRAIN = [CorpusRow(str(i), t, f"{t[-3:]}; {t}") for i, t in enumerate(tiny.SENTENCES * 3)]
GENERATION = GenerationSettings(PromptTemplate("{input} ->"), max_tokens=24)


@pytest.fixture(scope="module")
def given(folder: Path) -> Evaluation:
    source = ModelSource(folder, dtype="float64")
    return Evaluation(source, GENERATION, Setup(rows=4), "labels", TRAIN[:10], TRAIN, repeats=3)


def test_drafted_answers_equal_plain_answers_and_take_fewer_steps(given: Evaluation) -> None:
    progress: dict[str, tuple[int, int | None]] = {}
    found = evaluate(given, lambda stage, done, of: progress.update({stage: (done, of)}))
    plain, drafted = found.sides["plain"], found.sides["drafted"]
    assert found.identical == found.rows == 10
    assert plain.answers == drafted.answers
    assert any(plain.answers)
    assert plain.tokens_per_answer == plain.steps_per_answer == drafted.tokens_per_answer > 1
    assert drafted.steps_per_answer < plain.steps_per_answer
    for side in (plain, drafted):
        assert 0 < side.ms_per_answer.min <= side.ms_per_answer.median <= side.ms_per_answer.max
    assert found.speed_up is not None
    assert progress.keys() == STAGES.keys()
    assert all(done == of for done, of in progress.values())
    as_json = json.loads(json.dumps(found.as_json))
    assert as_json["ms_per_answer"] == plain.ms_per_answer.median
    assert as_json["renyi2_bits"] > 0


def test_answers_are_labels_of_the_task(given: Evaluation) -> None:
    labels = tuple({row.output for row in TRAIN[:4]})
    generation = replace(GENERATION, max_tokens=100, guide=GuideSpec("choice", labels))
    found = evaluate(replace(given, generation=generation, repeats=1))
    assert {*found.sides["plain"].answers} <= {*labels}
    assert found.identical == found.rows


def test_every_run_starts_without_the_answers_of_earlier_runs(given: Evaluation) -> None:
    measured = MeasuredModel(given.source, given.generation, given.setup)
    index = measured.index(TRAIN)
    prompts = measured.prompts([row.input for row in given.test])
    first, second = (answer(measured, prompts, index) for _ in range(2))
    assert first.steps == second.steps < first.tokens


def test_only_the_plain_side_is_measured_without_drafts_or_train_rows(given: Evaluation) -> None:
    one = evaluate(replace(given, drafts=False, metrics="exact", repeats=1))
    other = evaluate(replace(given, train=(), metrics="exact", repeats=1))
    for found in (one, other):
        assert found.sides.keys() == {"plain"}
        assert (found.identical, found.speed_up, found.precision_recall) == (None, None, ())
    assert one.renyi2_bits is not None
    assert other.renyi2_bits is None


def test_label_quality_is_reported_by_confidence(given: Evaluation) -> None:
    found = evaluate(replace(given, repeats=1, train=()))
    (all_,) = (at.quality for at in found.precision_recall if at.level == 0)
    assert all_.precision == pytest.approx(found.quality["precision"])
    assert all_.recall == pytest.approx(found.quality["recall"])
    page = evaluation_page(found)
    assert len(page.tables[2].rows) == len(found.precision_recall)
    assert [plot.title for plot in page.plots[:3]] == ["Quality", "Steps", "Time"]
    assert page.plots[3].title == "Precision by recall of labels"


@pytest.fixture(scope="module")
def classifier() -> tuple[Evaluation, LLM, Calibration]:
    """The shipped model on rows whose answers go on behind the intent, calibrated on them."""
    pairs = [(row["input"], row["output"]) for row in read_split(TASK, "test")[:80]]
    intents = sorted({output.partition(",")[0] for _, output in pairs})
    source, template = ModelSource(MODEL, ADAPTERS / TASK), TEMPLATES[TASK]
    llm = LLM(MODEL, adapter=source.adapter, template=template, choices=intents, cost_aware=False)
    fit = llm.calibrate(pairs, end=",")
    generation = GenerationSettings(PromptTemplate(template), guide=guide_of(llm.record))
    rows = [CorpusRow(str(at), *pair) for at, pair in enumerate(pairs)]
    given = Evaluation(
        source, generation, Setup(), "labels", rows, repeats=1, setting=TASK, record=llm.record
    )
    return given, llm, fit


def test_probabilities_of_choices_are_those_that_the_task_serves(
    classifier: tuple[Evaluation, LLM, Calibration],
) -> None:
    given, llm, fit = classifier
    progress: dict[str, tuple[int, int | None]] = {}
    found = evaluate(given, lambda stage, done, of: progress.update({stage: (done, of)}))
    assert progress["confidence"] == (80, 80)
    plain, calibrated = (found.reliability[side] for side in ("uncalibrated", "calibrated"))
    assert plain.accuracy == fit.before.accuracy
    assert (plain.error, plain.brier) == pytest.approx((fit.before.error, fit.before.brier))
    own = llm.classify([row.input for row in given.test], exact=True)
    right = [row.output.partition(",")[0] for row in given.test]
    hits = [one.label == label for one, label in zip(own, right, strict=True)]
    assert calibrated.accuracy == sum(hits) / 80
    squares = [
        sum((share - (label == y)) ** 2 for label, share in one.probabilities.items())
        for one, y in zip(own, right, strict=True)
    ]
    assert calibrated.brier == pytest.approx(sum(squares) / 80)
    assert calibrated.error != plain.error
    for at in calibrated.thresholds:
        sure = [hit for one, hit in zip(own, hits, strict=True) if one.probability >= at.threshold]
        assert at.coverage == len(sure) / 80
        assert at.accuracy == (sum(sure) / len(sure) if sure else None)
    assert found.precision_recall == ()
    # The answers are choices without what the rows have behind them.
    assert {*found.sides["plain"].answers} <= {*given.record.choices}
    assert found.quality["exact_match"] > 0.7


def test_report_shows_how_far_the_probabilities_of_choices_can_be_trusted(
    classifier: tuple[Evaluation, LLM, Calibration],
) -> None:
    given, _, fit = classifier
    uncalibrated = replace(given.record, label_temperature=None)
    found = evaluate(replace(given, record=uncalibrated, test=given.test[:60]))
    page = evaluation_page(found)
    reliability, thresholds = page.tables[-2:]
    assert [row[0] for row in reliability.rows] == ["uncalibrated"]
    assert reliability.rows[0][-1] == f"{found.reliability['uncalibrated'].accuracy:.2%}"
    assert len(thresholds.rows) == len(fit.after.thresholds)
    titles = [plot.title for plot in page.plots[-2:]]
    assert titles == ["Right labels by probability", "Right labels by answered rows"]
    as_json = json.loads(json.dumps(found.as_json))["reliability"]
    assert as_json.keys() == {"uncalibrated"}
    assert as_json["uncalibrated"]["thresholds"][0].keys() == {"threshold", "coverage", "accuracy"}


def test_rows_that_choices_do_not_fit_are_refused_or_left_out(
    classifier: tuple[Evaluation, LLM, Calibration],
) -> None:
    given, llm, _ = classifier
    stages: list[str] = []
    other = replace(given, test=[*given.test[:2], CorpusRow("x", "wake me", "intent: none, so")])
    with refused(UsageError, "row 3", "'intent: none, so'", f"tasc task set {llm.record.name}"):
        evaluate(other, lambda stage, *_: stages.append(stage))
    assert not stages
    # An answer would have room behind this prompt, but the labels have not.
    label = given.test[0].output
    long = CorpusRow("long", "wake " * 50, label)
    short = replace(given, setup=Setup(max_model_len=64), test=[given.test[0], long])
    found = evaluate(short)
    assert (found.rows, found.too_long) == (1, 1)
    assert evaluate(replace(short, metrics="exact")).too_long == 0


def test_prompts_without_room_for_an_answer_are_left_out(given: Evaluation) -> None:
    long = CorpusRow("long", "set an alarm " * 60, "x")
    short = replace(given, setup=Setup(rows=4, max_model_len=64), train=(), repeats=1)
    found = evaluate(replace(short, test=[*TRAIN[:2], long, *TRAIN[2:4]]))
    assert (found.rows, found.too_long) == (4, 1)
    with refused(EmptyCorpusError, "--max-model-len"):
        evaluate(replace(short, test=[long]))


def test_row_that_the_metrics_cannot_judge_is_named_before_any_run(given: Evaluation) -> None:
    rows = [CorpusRow("good", "x", "intent: a, slot fills: {}"), CorpusRow("bad-7", "y", "b; c")]
    stages: list[str] = []
    other = replace(given, metrics="massive", test=rows)
    with refused(UsageError, "bad-7", "--metrics"):
        evaluate(other, lambda stage, *_: stages.append(stage))
    assert not stages


def test_number_of_new_tokens_is_read_from_the_model(whole: Made) -> None:
    source, rows = ModelSource(whole.output / "model"), whole.bench.rows
    found = evaluate(Evaluation(source, GENERATION, Setup(), "exact", rows, rows, 1))
    assert found.budget == 6
    assert found.identical == found.rows == len(rows)


def test_model_with_fewer_ids_than_its_tokenizer_or_without_weights_is_refused(
    folder: Path, tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tiny.make_tokenizer(tmp_path, size=400)
    more = TaskTokenizer.from_folder(tmp_path).vocab_size
    assert more > tokenizer.vocab_size
    with refused(JobError, str(more)):
        MeasuredModel(ModelSource(tmp_path), GENERATION, Setup())
    (tmp_path / "model.safetensors").unlink()
    with refused(JobError, str(tmp_path)):
        MeasuredModel(ModelSource(tmp_path), GENERATION, Setup())


def test_evaluation_side_has_median_minimum_and_maximum_of_its_runs() -> None:
    runs = [Run(("a", "b"), 6, 4, seconds) for seconds in (0.2, 0.1, 0.6)]
    side = Side.of(runs)
    ms = side.ms_per_answer
    assert (ms.median, ms.min, ms.max) == (100, 50, 300)
    assert (side.tokens_per_answer, side.steps_per_answer) == (3, 2)
