"""Tests that the result of a fine-tune is complete or absent, in a folder of a single run."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning import Bench, Killed, killed_at
from support import failing_where, files_up_to, refused
from tasc_jobs.task_inputs import InputOptions, TaskInputs
from tasc_runtime.errors import ServiceError
from tasc_runtime.models import trained_prompt
from tasc_store import CorpusRow
from tasc_text import ChatTemplate, PromptTemplate, Template
from tasc_train.errors import FinetuneError
from tasc_train.finetune import finetuning, result
from tasc_train.finetune.checkpoints import FINETUNE, LOCK, REPORT, Checkpoints, OutputKind, claimed
from tasc_train.finetune.finetuning import CHECKPOINT, Finetune, finetune
from tasc_train.finetune.hyperparameters import FinetuneSettings
from tasc_train.finetune.training import Trainer

FULL = OSError(errno.ENOSPC, "No space left on device")
PARTS = {"adapter", "model", "README.md", REPORT}


@pytest.fixture(scope="module")
def trained(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that ended before it wrote its result."""
    output = tmp_path_factory.mktemp("trained")
    with pytest.raises(Killed):
        finetune(bench.job(output, epochs=1), killed_at("write", 0))
    return output


@pytest.fixture
def unwritten(bench: Bench, trained: Path, tmp_path: Path) -> Finetune:
    """A run in a copy of `trained`; only its result must still be written."""
    return bench.job(shutil.copytree(trained, tmp_path / "out"), epochs=1)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def at_call(owner: Any, name: str, number: int, error: BaseException) -> Iterator[None]:
    """Makes the call with this number of a function fail."""
    with pytest.MonkeyPatch.context() as patch:
        failing_where(patch, owner, name, error, lambda n, *_: n == number)
        yield


@pytest.mark.parametrize("error", [Killed(), FULL])
@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_result_is_complete_or_absent_after_every_failure(
    tmp_path: Path, name: str, error: BaseException
) -> None:
    for number in range(1, 100):
        unfinished, output = tmp_path / "unfinished", tmp_path / str(number)
        for part in ("adapter/weights", "model/weights", "README.md", REPORT):
            (unfinished / part).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / part).write_text("new")
        (output / "model").mkdir(parents=True)
        (output / "model" / "weights").write_text("left by a killed run")
        try:
            with at_call(os, name, number, error):
                result.publish(unfinished, output)
        except type(error):
            if (output / REPORT).exists():
                assert names(output) == PARTS
        else:
            break
    assert number == (5 if name == "replace" else 10)
    assert (output / "model" / "weights").read_text() == (output / REPORT).read_text() == "new"
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("owner", "name", "number", "error"),
    [
        (Path, "write_text", 5, FULL),
        (os, "replace", 4, Killed()),
    ],
)
def test_run_that_failed_while_writing_completes_when_repeated(
    unwritten: Finetune, owner: Any, name: str, number: int, error: BaseException
) -> None:
    output = unwritten.output
    with ExitStack() as failing:

        def write(stage: str, done: int, total: int | None) -> None:
            if stage == "write":
                failing.enter_context(at_call(owner, name, number, error))

        if error is FULL:
            with refused(FinetuneError, FULL.strerror):
                finetune(unwritten, write)
            assert not (output / "result.unfinished").exists()
        else:
            with pytest.raises(Killed):
                finetune(unwritten, write)
    assert not (output / REPORT).exists()
    assert (output / CHECKPOINT).is_file()
    finetune(unwritten)
    assert names(output) == {*PARTS, LOCK}
    assert json.loads((output / REPORT).read_text())["metrics"]["steps"] == 3


def test_full_disk_while_weights_are_written_is_reported(unwritten: Finetune) -> None:
    with ExitStack() as full:

        def write(stage: str, done: int, total: int | None) -> None:
            if stage == "write":
                full.enter_context(files_up_to(20_000))

        with refused(FinetuneError, "File too large"):
            finetune(unwritten, write)
    assert (unwritten.output / CHECKPOINT).is_file()


def test_merge_frees_training_memory_and_reports_a_lack_of_memory(unwritten, monkeypatch):
    trainers = list[weakref.ref[Trainer]]()
    made, load = Trainer.__init__, result.AutoModelForCausalLM.from_pretrained

    def remembered(self: Trainer, *given: Any) -> None:
        trainers.append(weakref.ref(self))
        made(self, *given)

    def merge(*given: Any, **named: Any) -> Any:
        if not trainers:
            return load(*given, **named)
        assert trainers[0]() is None
        return torch.empty(2**58)

    monkeypatch.setattr(Trainer, "__init__", remembered)
    monkeypatch.setattr(result.AutoModelForCausalLM, "from_pretrained", merge)
    with refused(FinetuneError, "memory"):
        finetune(unwritten)
    assert (unwritten.output / CHECKPOINT).is_file()
    assert not (unwritten.output / "result.unfinished").exists()


def test_base_that_became_unreadable_is_named_in_the_error(bench: Bench, tmp_path: Path) -> None:
    base = shutil.copytree(bench.base, tmp_path / "base")
    job = replace(bench.job(tmp_path / "out", epochs=1), base=base)
    for file, named in (("model.safetensors", str(base)), ("generation_config.json",) * 2):
        kept = (base / file).read_bytes()

        def damage(stage: str, done: int, total: int | None, file: str = file) -> None:
            if stage == "write":
                (base / file).write_text("{")

        with refused(FinetuneError, named):
            finetune(job, damage)
        assert names(job.output) == {CHECKPOINT, LOCK}
        (base / file).write_bytes(kept)
    finetune(job)


@pytest.mark.parametrize(("owner", "name"), [(Path, "rmdir"), (Checkpoints, "remove")])
def test_second_run_removes_files_that_a_killed_run_left(unwritten, owner, name):
    with at_call(owner, name, 1, Killed()), pytest.raises(Killed):
        finetune(unwritten)
    assert names(unwritten.output) > {*PARTS, LOCK}
    with refused(FinetuneError, str(unwritten.output), "choose another output"):
        finetune(replace(unwritten, settings=replace(unwritten.settings, rank=4)))
    assert finetune(unwritten)["steps"] == 3
    assert names(unwritten.output) == {*PARTS, LOCK}


@pytest.mark.parametrize(
    "template",
    [
        PromptTemplate("say {input}\n"),
        ChatTemplate(
            "{{ messages[-1].content }}", (("bos_token", "a"),), "Be brief.", (("a", "b"),)
        ),
    ],
)
def test_fine_tune_result_keeps_the_training_prompt(
    unwritten: Finetune, template: Template
) -> None:
    (unwritten.output / CHECKPOINT).unlink()  # it is of another prompt
    finetune(
        replace(unwritten, template=template, settings=replace(unwritten.settings, epochs=0.01))
    )
    for part in ("adapter", "model"):
        assert trained_prompt(None, "acme/none", unwritten.output / part) == template
        named = InputOptions(model=str(unwritten.output / part))
        assert TaskInputs(named, None, ()).template == template
    (unwritten.output / "model" / "tasc_prompt.json").write_text("{")
    with refused(ServiceError, "tasc_prompt.json"):
        trained_prompt(unwritten.output / "model")


def test_finished_run_is_reported_again_and_a_different_run_is_refused(
    unwritten: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = finetune(unwritten)
    monkeypatch.setattr(finetuning, "_trained", None)  # nothing may be trained again
    assert finetune(replace(unwritten, checkpoint_s=5.0)) == found
    for changes in (
        {"rows": unwritten.rows[1:]},
        {"template": PromptTemplate("{input} =>")},
        {"base_name": "acme/other"},
        {"settings": replace(unwritten.settings, seed=1)},
    ):
        with refused(FinetuneError, str(unwritten.output), "choose another output"):
            finetune(replace(unwritten, **changes))


def test_adapter_card_and_report_name_the_base_and_its_revision(unwritten: Finetune) -> None:
    from peft import PeftConfig

    finetune(replace(unwritten, base_name="acme/pinned-model", revision="0123abc"))
    config = PeftConfig.from_pretrained(unwritten.output / "adapter")
    assert (config.base_model_name_or_path, config.revision) == ("acme/pinned-model", "0123abc")
    assert "revision `0123abc`" in (unwritten.output / "README.md").read_text()
    assert json.loads((unwritten.output / REPORT).read_text())["revision"] == "0123abc"


def test_model_of_the_hub_has_the_commit_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = tmp_path / "snapshots" / "0123abc"
    monkeypatch.setattr(finetuning, "resolve_folder", lambda name, revision: commit)
    named = InputOptions("t", model="acme/model", template="{input}")
    inputs = TaskInputs(named, None, [CorpusRow("1", "a", "b")])
    job = finetuning.job_of(inputs, FinetuneSettings(), tmp_path / "out", 60.0)
    assert (job.base, job.base_name, job.revision) == (commit, "acme/model", "0123abc")


HOLDS = """
import sys
from pathlib import Path
from tasc_train.finetune.checkpoints import FINETUNE, claimed
with claimed(Path(sys.argv[1]), FINETUNE):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_folder_is_locked_during_the_run_and_free_afterwards(bench: Bench, tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout
        assert first.stdout.readline() == b"held\n"
        with refused(FinetuneError, "another process"):
            finetune(bench.job(tmp_path, epochs=1))
        assert not (tmp_path / CHECKPOINT).exists()
    finally:
        first.kill()
        first.communicate()
    stages: list[str] = []

    def claim(stage: str, done: int, total: int | None) -> None:
        with refused(FinetuneError, "another process"), claimed(tmp_path, FINETUNE):
            pass
        stages.append(stage)

    finetune(bench.job(tmp_path, epochs=1), claim)
    assert stages == ["train"] * 4 + ["write"] * 2
    with claimed(tmp_path, FINETUNE):
        pass


def test_folders_that_cannot_be_written_or_locked_are_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(FinetuneError, "file/out"), claimed(tmp_path / "file" / "out", FINETUNE):
        pass
    no_locks = OSError(errno.ENOLCK, "No locks available")
    with (
        at_call(fcntl, "flock", 1, no_locks),
        refused(FinetuneError, "No locks available"),
        claimed(tmp_path / "out", FINETUNE),
    ):
        pass


def test_output_of_another_kind_of_run_is_refused_but_other_files_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.log").write_text("")
    drafter = OutputKind("a drafter's training", ())
    for _ in range(2):
        with claimed(tmp_path, FINETUNE):
            assert names(tmp_path) == {"train.log", LOCK}
        with refused(FinetuneError, FINETUNE.name, drafter.name), claimed(tmp_path, drafter):
            pass
