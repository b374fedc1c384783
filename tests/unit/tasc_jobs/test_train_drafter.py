"""A drafter learns what its target says, and a run that is killed ends as one that is not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafter_training import INPUTS, ROWS, Bench, make
from tasc_engine.neural.card import Kind, read_card
from tasc_jobs.drafter import job as job_module
from tasc_jobs.drafter.answers import ANSWERS, read_answers
from tasc_jobs.drafter.job import CHECKPOINT, REPORT, train_drafter
from tasc_jobs.drafter.training import DrafterTrainer, packed
from tasc_jobs.errors import FileError, JobError
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.examples import Example

SHORT = {"epochs": 2}
KINDS: tuple[Kind, ...] = ("eagle", "independent")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make(tmp_path_factory.mktemp("target"), "qwen2")


class Killed(Exception):
    """As if the process had ended."""


def killed_at(stage: str, done: int) -> Any:
    def progress(name: str, so_far: int, total: int | None) -> None:
        if (name, so_far) == (stage, done):
            raise Killed

    return progress


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_drafter_learns_what_its_target_says(
    tmp_path: Path, architecture: str, kind: Kind
) -> None:
    said: list[str] = []
    found = train_drafter(
        make(tmp_path / "target", architecture).job(tmp_path / "out", kind), say=said.append
    )
    assert found["agreement"] > 0.8
    assert found["loss"] < found["first_loss"] / 2
    assert (found["rows"], found["held_out"], found["left_out"]) == (38, 2, 0)
    assert len(said) == found["steps"]
    assert json.loads((tmp_path / "out" / REPORT).read_text()) == found
    kept = sum(value.numel() for value in weights(tmp_path / "out").values())
    assert kept == found["parameters"]


def test_an_untrained_drafter_agrees_with_nothing(bench: Bench, tmp_path: Path) -> None:
    assert train_drafter(bench.job(tmp_path, "eagle", epochs=0.2))["agreement"] < 0.5


def test_a_target_that_no_head_can_read_has_a_small_drafter(tmp_path: Path) -> None:
    bench = make(tmp_path / "target", "gpt_neox")
    with pytest.raises(FinetuneError, match="this is gpt_neox; take --kind independent"):
        train_drafter(bench.job(tmp_path / "out", "eagle"))
    train_drafter(bench.job(tmp_path / "out", "independent", **SHORT))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(("stage", "done"), [("answer", 7), ("train", 1), ("train", 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    bench: Bench, tmp_path: Path, kind: Kind, stage: str, done: int
) -> None:
    train_drafter(bench.job(tmp_path / "whole", kind, **SHORT))
    job = replace(bench.job(tmp_path / "killed", kind, **SHORT), checkpoint_s=0.0)
    with pytest.raises(Killed):
        train_drafter(job, killed_at(stage, done))
    assert not (job.output / "drafter.json").exists()
    seen: list[tuple[str, int]] = []
    train_drafter(job, lambda name, so_far, total: seen.append((name, so_far)))
    assert seen[0] == ("answer", done if stage == "answer" else len(ROWS))
    if stage == "train":
        assert next(at for name, at in seen if name == "train") == done - 1
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (job.output / CHECKPOINT).exists()


def test_half_a_line_of_a_killed_run_is_answered_again(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train_drafter(bench.job(tmp_path, "eagle", **SHORT), killed_at("answer", 9))
    file = tmp_path / ANSWERS
    file.write_bytes(file.read_bytes()[:-5])
    seen: list[int] = []
    train_drafter(bench.job(tmp_path, "eagle", **SHORT), lambda name, at, of: seen.append(at))
    assert seen[0] == 8
    assert [answer.id for answer in read_answers(file)].count("8") == 1
    assert len(read_answers(file)) == len(ROWS)


def test_answers_made_before_are_learnt_with_and_without_ids(bench: Bench, tmp_path: Path) -> None:
    train_drafter(bench.job(tmp_path / "one", "eagle", **SHORT))
    answers = read_answers(tmp_path / "one" / ANSWERS)
    assert {answer.input for answer in answers} == set(INPUTS)
    assert all(answer.ids for answer in answers)
    ordered = sorted(answers, key=lambda answer: int(answer.id))
    job = replace(bench.job(tmp_path / "other", "eagle", **SHORT), rows=(), answers=ordered)
    train_drafter(job)
    one, other = weights(tmp_path / "one"), weights(tmp_path / "other")
    assert all(torch.equal(one[name], other[name]) for name in one)
    texts = [replace(answer, ids=None) for answer in ordered]
    train_drafter(replace(job, output=tmp_path / "texts", answers=texts))
    assert read_card(tmp_path / "texts").kind == "eagle"


@pytest.mark.parametrize(
    "line",
    ['{"id": "1"}', "no json", '{"id": "1", "input": "a", "output": "b", "ids": ["x"]}', "[]"],
)
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"id": "0", "input": "a", "output": "b"}\n' + line + "\n")
    with pytest.raises(FileError, match=r"line 2 of .*answers\.jsonl gives no answer: "):
        read_answers(file)


def test_a_token_that_the_tokenizer_has_not_is_named(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"id": "7", "input": "a", "output": "b", "ids": [4, 99999]}\n')
    job = replace(bench.job(tmp_path / "out", "eagle"), answers=read_answers(file))
    with pytest.raises(FileError, match="answer 7 has tokens from 4 to 99999, the tokenizer has"):
        train_drafter(job)


def test_other_settings_or_another_target_are_not_gone_on_with(
    bench: Bench, tmp_path: Path
) -> None:
    job = replace(bench.job(tmp_path / "out", "eagle", **SHORT), checkpoint_s=0.0)
    with pytest.raises(Killed):
        train_drafter(job, killed_at("train", 3))
    with pytest.raises(FinetuneError, match="with another noise;"):
        train_drafter(replace(job, settings=replace(job.settings, noise=0.5)))
    other = make(tmp_path / "target", "qwen2", seed=1).job(tmp_path / "out", "eagle", **SHORT)
    with pytest.raises(JobError, match="made with another target; name another output"):
        train_drafter(other)


def test_a_loss_that_is_no_number_ends_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = DrafterTrainer._loss
    monkeypatch.setattr(
        job_module.DrafterTrainer, "_loss", lambda self, rows: loss(self, rows) * float("nan")
    )
    with pytest.raises(FinetuneError, match=r"the loss of step 1 of 10 is nan.*--learning-rate"):
        train_drafter(bench.job(tmp_path, "eagle", **SHORT))


def test_rows_that_are_too_long_are_left_out_and_what_is_made_stays(
    bench: Bench, tmp_path: Path
) -> None:
    with pytest.raises(FinetuneError, match="0 of 40 answers have 3 to 4 tokens"):
        train_drafter(bench.job(tmp_path, "independent", max_length=4))
    train_drafter(bench.job(tmp_path, "independent", **SHORT))
    with pytest.raises(FinetuneError, match="has a drafter already; name another output"):
        train_drafter(bench.job(tmp_path, "independent", **SHORT))


def test_what_matters_of_a_row_are_its_answer_and_a_little_of_its_prompt() -> None:
    ids, weights = packed([Example((1, 2, 3, 4, 5), 3), Example((6, 7, 8), 1)], 0.5)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert weights.tolist() == [[0.5, 0.5, 1, 1], [1, 1, 0, 0]]


def test_a_model_is_not_written_over_by_its_drafter(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("a model")
    with pytest.raises(FinetuneError, match=r"has model\.safetensors of something else, which a d"):
        train_drafter(bench.job(tmp_path, "eagle", **SHORT))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
