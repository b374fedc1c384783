"""What a fine-tune writes is whole or not there."""

import errno
import json
import os
import resource
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import finetuning
from tasc_jobs.finetune import command, result
from tasc_jobs.finetune.checkpoints import Checkpoints
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.finished import REPORT
from tasc_jobs.finetune.job import CHECKPOINT, finetune
from tasc_jobs.finetune.settings import FinetuneSettings
from tasc_jobs.finetune.training import Trainer


class Killed(BaseException):
    """As if the process had ended."""


FULL = OSError(errno.ENOSPC, "No space left on device")
PARTS = {"adapter", "model", "README.md", REPORT}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> finetuning.Bench:
    return finetuning.make(tmp_path_factory.mktemp("bench"), "qwen2")


@pytest.fixture(scope="module")
def learnt(bench: finetuning.Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has left that ended before it wrote anything."""
    output = tmp_path_factory.mktemp("learnt")

    def end(stage: str, done: int, total: int | None) -> None:
        if stage == "write":
            raise Killed

    with pytest.raises(Killed):
        finetune(bench.job(output, epochs=1), end)
    return output


@contextmanager
def at_call(owner: Any, name: str, number: int, error: BaseException) -> Iterator[list[int]]:
    """The so-manieth call of a function fails; counts them."""
    real, calls = getattr(owner, name), list[int]()

    def called(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise error
        return real(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, called)
        yield calls


@pytest.mark.parametrize("error", [Killed(), FULL])
@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_result_is_whole_wherever_its_writing_ended(
    tmp_path: Path, name: str, error: BaseException
) -> None:
    for number in range(1, 100):
        begun = tmp_path / "begun"
        for part in ("adapter", "model"):
            (begun / part).mkdir(parents=True, exist_ok=True)
            (begun / part / "weights").write_text("new")
        for part in ("README.md", REPORT):
            (begun / part).write_text("new")
        output = tmp_path / str(number)
        (output / "model").mkdir(parents=True)
        (output / "model" / "weights").write_text("of a run that was killed")
        try:
            with at_call(os, name, number, error):
                result.publish(begun, output)
        except type(error):
            if (output / REPORT).exists():
                assert {path.name for path in output.iterdir()} == PARTS
        else:
            break
    assert number == (5 if name == "replace" else 10)
    assert (output / "model" / "weights").read_text() == (output / REPORT).read_text() == "new"
    assert not begun.exists()


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [(Path, "write_text", 1), (Path, "write_text", 5), (os, "replace", 4), (os, "fsync", 1)],
)
@pytest.mark.parametrize("error", [Killed(), FULL])
def test_a_run_that_ended_while_it_wrote_ends_when_it_is_run_again(
    bench: finetuning.Bench, learnt: Path, tmp_path: Path, owner: Any, name: str, number: int,
    error: BaseException,
) -> None:  # fmt: skip
    output = tmp_path / "out"
    shutil.copytree(learnt, output)
    job = bench.job(output, epochs=1)
    with ExitStack() as failing:

        def write(stage: str, done: int, total: int | None) -> None:
            if stage == "write":
                failing.enter_context(at_call(owner, name, number, error))

        if error is FULL:
            with pytest.raises(FinetuneError, match="No space left on device; make room and run"):
                finetune(job, write)
            assert not (output / "result.begun").exists()
        else:
            with pytest.raises(Killed):
                finetune(job, write)
    assert not (output / REPORT).exists()
    assert (output / CHECKPOINT).is_dir()
    finetune(job)
    assert {path.name for path in output.iterdir()} == {*PARTS, ".lock"}
    assert json.loads((output / REPORT).read_text())["metrics"]["steps"] == 3


def test_a_disk_that_is_full_while_weights_are_written_is_said(
    bench: finetuning.Bench, learnt: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(learnt, output)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(stage: str, done: int, total: int | None) -> None:
        if stage == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(FinetuneError, match="cannot be written to .*File too large.*make room"):
            finetune(bench.job(output, epochs=1), write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (output / CHECKPOINT).is_dir()


def test_a_merge_that_has_too_little_memory_is_said_and_the_training_is_gone(
    bench: finetuning.Bench, learnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, trainers = tmp_path / "out", list[weakref.ref[Trainer]]()
    shutil.copytree(learnt, output)
    made = Trainer.__init__

    def seen(self: Trainer, *given: Any) -> None:
        trainers.append(weakref.ref(self))
        made(self, *given)

    load = result.AutoModelForCausalLM.from_pretrained

    def merge(*given: Any, **named: Any) -> Any:
        if not trainers:
            return load(*given, **named)
        assert trainers[0]() is None
        return torch.empty(2**58)

    monkeypatch.setattr(Trainer, "__init__", seen)
    monkeypatch.setattr(result.AutoModelForCausalLM, "from_pretrained", merge)
    with pytest.raises(FinetuneError, match="too little memory to put the adapter into .*run the"):
        finetune(bench.job(output, epochs=1))
    assert (output / CHECKPOINT).is_dir()
    assert not (output / "result.begun").exists()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model.safetensors", "cannot be read any more: .*; mend it and run the same command"),
        ("generation_config.json", "generation_config.json of the model or .* is damaged .*; mend"),
    ],
)
def test_a_base_that_cannot_be_read_any_more_is_said(
    bench: finetuning.Bench, tmp_path: Path, file: str, said: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bench.base, base)
    job = replace(bench.job(tmp_path / "out", epochs=1), base=base)

    def damage(stage: str, done: int, total: int | None) -> None:
        if stage == "write":
            (base / file).write_text("{")

    with pytest.raises(FinetuneError, match=said):
        finetune(job, damage)
    assert {path.name for path in job.output.iterdir()} == {CHECKPOINT, ".lock"}
    shutil.copytree(bench.base, base, dirs_exist_ok=True)
    if not (bench.base / file).exists():
        (base / file).unlink()
    finetune(job)


@pytest.mark.parametrize(("owner", "name"), [(Path, "rmdir"), (Checkpoints, "remove")])
def test_what_a_killed_run_left_beside_its_result_goes_when_it_is_run_again(
    bench: finetuning.Bench, learnt: Path, tmp_path: Path, owner: Any, name: str
) -> None:
    output = tmp_path / "out"
    shutil.copytree(learnt, output)
    job = bench.job(output, epochs=1)
    with at_call(owner, name, 1, Killed()), pytest.raises(Killed):
        finetune(job)
    assert {path.name for path in output.iterdir()} > {*PARTS, ".lock"}
    with pytest.raises(FinetuneError, match="has a fine-tuned model already"):
        finetune(job)
    assert {path.name for path in output.iterdir()} == {*PARTS, ".lock"}


def test_the_base_is_the_one_trained_on_and_told_with_its_revision(
    bench: finetuning.Bench, tmp_path: Path
) -> None:
    from peft import PeftConfig

    snapshot = tmp_path / "snapshots" / "0123abc"
    shutil.copytree(bench.base, snapshot)
    job = replace(
        bench.job(tmp_path / "out", epochs=1), base=snapshot, base_name="acme/pinned-model",
        revision="0123abc",
    )  # fmt: skip
    finetune(job)
    told = PeftConfig.from_pretrained(tmp_path / "out" / "adapter")
    assert (told.base_model_name_or_path, told.revision) == ("acme/pinned-model", "0123abc")
    assert "revision `0123abc`" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / REPORT).read_text())["revision"] == "0123abc"


def test_a_model_of_the_hub_is_told_by_the_commit_that_is_here(
    bench: finetuning.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "1", "input": "a", "output": "b"}\n')
    commit = tmp_path / "snapshots" / "0123abc"
    monkeypatch.setattr(command, "resolve_folder", lambda name, revision: commit)
    given = command.Given("t", "acme/model", None, "{input}", (file,), ("input", "output"))
    job = command.job_of(None, given, FinetuneSettings(), tmp_path / "out", 60.0)
    assert (job.base, job.base_name, job.revision) == (commit, "acme/model", "0123abc")
