"""Tests a drafter's training from a target's answers, and that a killed run resumes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drafter_training import INPUTS, ROWS, SHORT, Bench, Trained, make
from finetuning import Killed, killed_at, same
from support import refused, write_rows
from tasc_engine.drafting.neural.card import Kind, read_card
from tasc_engine.drafting.neural.files import WEIGHTS
from tasc_jobs.cli.main import app
from tasc_jobs.errors import JobError, UsageError
from tasc_runtime.errors import FileError
from tasc_train.drafter.answers import ANSWERS, read_answers
from tasc_train.drafter.hyperparameters import DrafterSettings
from tasc_train.drafter.training_run import CHECKPOINT, train_drafter
from tasc_train.errors import FinetuneError
from tasc_train.finetune.examples import Example, packed

OWN: dict[Kind, dict[str, float]] = {
    "eagle": {"token_weight": DrafterSettings.token_weight, "noise": 0.0, "own_share": 0.25},
    "independent": {"prompt_weight": DrafterSettings.prompt_weight, "layers": 2, "hidden": 16},
}
OTHER: dict[Kind, Kind] = {"eagle": "independent", "independent": "eagle"}


def test_untrained_drafter_predicts_few_tokens(target: Bench, tmp_path: Path) -> None:
    assert train_drafter(target.job(tmp_path, "eagle", epochs=0.2))["agreement"] < 0.5


def test_target_without_hidden_states_gets_only_an_independent_drafter(tmp_path: Path) -> None:
    target = make(tmp_path / "target", "gpt_neox")
    with refused(FinetuneError, "gpt_neox", "--kind independent"):
        train_drafter(target.job(tmp_path / "out", "eagle"))
    train_drafter(target.job(tmp_path / "out", "independent", **SHORT))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("short", "stage", "done"),
    [
        ("independent", "answer", 7),
        ("eagle", "train", 6),
    ],
    indirect=["short"],
)
def test_killed_run_ends_with_the_weights_of_an_uninterrupted_run(
    short: Trained, tmp_path: Path, stage: str, done: int
) -> None:
    job = replace(short.bench.job(tmp_path, short.kind, **SHORT), checkpoint_s=0.0)
    with pytest.raises(Killed):
        train_drafter(job, killed_at(stage, done))
    assert not (tmp_path / "drafter.json").exists()
    calls: list[tuple[str, int]] = []
    train_drafter(job, lambda name, so_far, total: calls.append((name, so_far)))
    assert calls[0] == ("answer", done if stage == "answer" else len(ROWS))
    if stage == "train":
        assert next(at for name, at in calls if name == "train") == done - 1
    assert same(tmp_path / WEIGHTS, short.folder / WEIGHTS)
    assert not (tmp_path / CHECKPOINT).exists()
    found = train_drafter(replace(job, checkpoint_s=9.0), killed_at("answer", len(ROWS)))
    assert found["steps"] == 10  # reported again, and nothing is answered or trained
    for name, other in (
        ("seed", replace(job, settings=replace(job.settings, seed=5))),
        ("asked", replace(job, rows=job.rows[:-1])),
    ):
        with refused(FinetuneError, str(tmp_path), f"different {name};"):
            train_drafter(other)


def test_row_of_an_incomplete_line_is_answered_again(target: Bench, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train_drafter(target.job(tmp_path, "eagle", **SHORT), killed_at("answer", 9))
    file = tmp_path / ANSWERS
    file.write_bytes(file.read_bytes()[:-5])
    calls: list[int] = []
    train_drafter(target.job(tmp_path, "eagle", **SHORT), lambda name, at, of: calls.append(at))
    assert calls[0] == 8
    assert [answer.id for answer in read_answers(file)].count("8") == 1
    assert len(read_answers(file)) == len(ROWS)


@pytest.mark.parametrize("short", ["eagle"], indirect=True)
def test_existing_answers_are_used_with_or_without_token_ids(
    short: Trained, tmp_path: Path
) -> None:
    answers = read_answers(short.folder / ANSWERS)
    assert {answer.input for answer in answers} == set(INPUTS)
    assert all(answer.ids for answer in answers)
    ordered = sorted(answers, key=lambda answer: int(answer.id))
    job = replace(short.bench.job(tmp_path / "other", "eagle", **SHORT), rows=(), answers=ordered)
    train_drafter(job)
    assert same(job.output / WEIGHTS, short.folder / WEIGHTS)
    texts = [replace(answer, ids=None) for answer in ordered]
    train_drafter(replace(job, output=tmp_path / "texts", answers=texts))
    assert read_card(tmp_path / "texts").kind == "eagle"


@pytest.mark.parametrize(
    "line",
    ['{"id": "1"}', "no json", '{"id": "1", "input": "a", "output": "b", "ids": ["x"]}', "[]"],
)
def test_line_that_is_not_an_answer_is_named_in_the_error(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"id": "0", "input": "a", "output": "b"}\n' + line + "\n")
    with refused(FileError, "line 2 of", "answers.jsonl"):
        read_answers(file)


def test_token_outside_the_vocabulary_is_named_in_the_error(target: Bench, tmp_path: Path) -> None:
    answer = {"id": "7", "input": "a", "output": "b", "ids": [4, 99999]}
    answers = read_answers(write_rows(tmp_path / "answers.jsonl", [answer]))
    with refused(FileError, "answer 7", "99999"):
        train_drafter(replace(target.job(tmp_path / "out", "eagle"), answers=answers))


def test_checkpoint_of_other_settings_and_answers_of_another_target_are_refused(
    target: Bench, tmp_path: Path
) -> None:
    job = replace(target.job(tmp_path / "out", "eagle", **SHORT), checkpoint_s=0.0)
    with pytest.raises(Killed):
        train_drafter(job, killed_at("train", 3))
    with refused(FinetuneError, "noise"):
        train_drafter(replace(job, settings=replace(job.settings, noise=0.5)))
    other = make(tmp_path / "target", "qwen2", seed=1).job(tmp_path / "out", "eagle", **SHORT)
    with refused(JobError, "target"):
        train_drafter(other)


def test_loss_weights_are_one_in_answers_and_smaller_in_prompts() -> None:
    ids, weights = packed([Example((1, 2, 3, 4, 5), 3), Example((6, 7, 8), 1)], 0.5)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert weights.tolist() == [[0.5, 0.5, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(OTHER[kind], *each) for kind, own in OWN.items() for each in own.items()],
)
def test_setting_of_the_other_kind_is_refused_with_option_and_kind(tmp_path, kind, name, value):
    output, option = tmp_path / "out", "--" + name.replace("_", "-")
    given = ["train-drafter", "t", "--kind", kind, "--output", str(output), option, str(value)]
    error = CliRunner().invoke(app, given).exception
    assert isinstance(error, UsageError)
    named = (f"{option} {value}", f"--kind {OTHER[kind]}", f"--kind {kind}")
    assert all(part in str(error) for part in named)
    assert not output.exists()
