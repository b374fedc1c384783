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
from tasc_jobs.errors import EmptyCorpusError, JobError, UsageError
from tasc_protocol import GuideSpec
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
