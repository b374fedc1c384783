"""Tests that a killed, interrupted or failed training resumes after its last complete step."""

import math
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from drafter_training import ROWS, SHORT, Trained
from finetuning import ADAPTER, Bench, Killed, Made, begin, killed_at, same
from support import failing, files_up_to, refused
from tasc_jobs.drafter.training import DrafterTrainer
from tasc_jobs.drafter.training_run import train_drafter
from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.checkpoints import FINETUNE, Checkpoint, Checkpoints, claimed
from tasc_jobs.finetune.finetuning import CHECKPOINT, finetune
from tasc_jobs.finetune.training import Trainer, deferred_signals
from tasc_runtime.progress import StageProgress, silent

Amid = Callable[[Callable[[], None]], AbstractContextManager[StageProgress]]


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow("a run that begins again is below")), 4]
)
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    bench: Bench, whole: Made, tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = bench.job(tmp_path)
    begin(job, step)
    assert not (tmp_path / "finetune.json").exists()
    seen, said = list[int](), list[str]()
    capsys.readouterr()
    finetune(job, lambda stage, done, total: seen.append(done), say=said.append)
    kept = step - 1  # the step that was killed had no checkpoint yet
    assert seen[0] == kept
    assert same(tmp_path / ADAPTER, whole.output / ADAPTER)
    assert not (tmp_path / CHECKPOINT).exists()
    assert len(said) == 9 - kept
    assert all(re.fullmatch(r"loss \d+\.\d{3}, [\d,]+ tokens/s", text) for text in said)
    err = capsys.readouterr().err
    assert "LoRA" in err
    assert (f"step {kept} of 9" in err) == bool(kept)


def test_what_changes_the_result_is_not_gone_on_with(bench, killed, monkeypatch):
    pins = torch.load(killed / CHECKPOINT)["pins"]
    assert (pins["nf4"], pins["device"], pins["dtype"]) == (False, "cpu", "float32")
    fewer = replace(bench, rows=bench.rows[1:])
    for job, changed in (
        (bench.job(killed, learning_rate=0.5), "learning_rate"),
        (fewer.job(killed), "rows"),
        (bench.job(killed, quantization="nf4"), "nf4"),
    ):
        with refused(FinetuneError, f" {changed};"):
            finetune(job)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with refused(FinetuneError, "nf4, device, dtype"):
            finetune(bench.job(killed))
    begin(bench.job(killed, quantization="none"), 6)  # the resolved value of auto
    assert len(torch.load(killed / CHECKPOINT)["losses"]) == 5


@pytest.fixture(params=["fine-tune", "drafter"])
def training(request, bench, target):
    """The factory of a job, the function that runs it, its trainer, and a file of its result."""
    if request.param == "fine-tune":
        return bench.job, finetune, Trainer, "README.md"
    job = partial(target.job, kind="eagle", **SHORT)
    return job, train_drafter, DrafterTrainer, "model.safetensors"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda loss: loss * math.nan, ("step 3", "nan", "--learning-rate")),
        (lambda loss: loss.register_hook(lambda g: g * math.inf) and loss, ("gradient", "step 3")),
    ],
)
def test_a_loss_or_a_gradient_that_is_no_number_ends_it_and_the_last_checkpoint_stays(
    training, tmp_path, monkeypatch, change, named
):
    make, run, trainer, _ = training
    job, loss = replace(make(tmp_path), checkpoint_s=0.0), trainer.loss
    with pytest.raises(Killed):
        run(job, killed_at("train", 3))
    before = (tmp_path / CHECKPOINT).read_bytes()
    monkeypatch.setattr(trainer, "loss", lambda self, rows: change(loss(self, rows)))
    with refused(FinetuneError, *named):
        run(job)
    assert (tmp_path / CHECKPOINT).read_bytes() == before


def test_rows_that_are_all_too_long_and_a_folder_of_something_else_are_refused(training, tmp_path):
    make, run, _, name = training
    with refused(FinetuneError, "--max-length"):
        run(make(tmp_path / "out", max_length=3))
    # Another run may use the folder, but a target's answers stay.
    assert (tmp_path / "out").exists() == (run is train_drafter)
    (tmp_path / name).write_text("mine")
    with refused(FinetuneError, name):
        run(make(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {name, "out"}
    assert (tmp_path / name).read_text() == "mine"


def test_a_disk_that_is_full_leaves_the_last_checkpoint(bench: Bench, killed: Path) -> None:
    before = (killed / CHECKPOINT).read_bytes()
    with files_up_to(4096), refused(FinetuneError, "step 2"):
        finetune(replace(bench.job(killed), checkpoint_s=0.0))
    assert (killed / CHECKPOINT).read_bytes() == before
    finetune(bench.job(killed))


def test_seconds_are_of_all_pieces(bench: Bench, whole: Made, killed: Path) -> None:
    tokens = whole.found["tokens_per_second"] * whole.found["seconds"]
    torch.save(torch.load(killed / CHECKPOINT) | {"seconds": 1e6}, killed / CHECKPOINT)
    found = finetune(bench.job(killed))
    assert found["seconds"] > 1e6
    assert found["tokens_per_second"] * found["seconds"] == pytest.approx(tokens)


# --- Ctrl-C and SIGTERM -------------------------------------------------------------------------


@pytest.fixture
def _at_a_terminal() -> Iterator[None]:
    """Gives Ctrl-C and SIGTERM the handlers of the command at a terminal.

    A background job ignores Ctrl-C at its start.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum)),
    }
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def at_call(number: int, signum: int) -> Callable[[], None]:
    """Returns a function that sends a signal at the call with this number."""
    calls = iter(range(1, 1000))

    def call() -> None:
        if next(calls) == number:
            signal.raise_signal(signum)

    return call


@contextmanager
def between_steps(call: Callable[[], None]) -> Iterator[StageProgress]:
    yield lambda stage, done, total: call() if done else None


@contextmanager
def in_a_step(call: Callable[[], None]) -> Iterator[StageProgress]:
    """Calls ``call`` before each part of the rows of a step."""
    loss = Trainer.loss

    def called(self: Trainer, rows: Any) -> torch.Tensor:
        call()
        return loss(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "loss", called)
        yield silent


@contextmanager
def in_a_change_of_weights(call: Callable[[], None]) -> Iterator[StageProgress]:
    hook = register_optimizer_step_post_hook(lambda *args: call())
    try:
        yield silent
    finally:
        hook.remove()


ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}
OTHER_SIGNAL = pytest.mark.slow("the other signal ends a step there daily")


@pytest.mark.usefixtures("_at_a_terminal")
@pytest.mark.parametrize(
    ("amid", "call", "kept", "signum"),
    [
        (in_a_step, 1, 0, signal.SIGINT),
        (between_steps, 2, 2, signal.SIGINT),
        (in_a_step, 5, 1, signal.SIGTERM),
        (in_a_change_of_weights, 3, 3, signal.SIGINT),
        pytest.param(between_steps, 2, 2, signal.SIGTERM, marks=OTHER_SIGNAL),
        pytest.param(in_a_step, 5, 1, signal.SIGINT, marks=OTHER_SIGNAL),
        pytest.param(in_a_change_of_weights, 3, 3, signal.SIGTERM, marks=OTHER_SIGNAL),
    ],
)
def test_an_interrupted_run_goes_on_behind_its_last_whole_step(
    bench, whole, tmp_path, capsys, amid, call, kept, signum
):
    with amid(at_call(call, signum)) as progress, pytest.raises(ENDS[signum]):
        finetune(bench.job(tmp_path), progress)
    assert (f"step {kept} of 9 is kept" in capsys.readouterr().err) == bool(kept)
    assert (tmp_path / CHECKPOINT).exists() == bool(kept)
    seen: list[int] = []
    finetune(bench.job(tmp_path), lambda stage, done, total: seen.append(done))
    assert seen[0] == kept
    assert same(tmp_path / ADAPTER, whole.output / ADAPTER)


@pytest.mark.usefixtures("_at_a_terminal")
def test_an_interrupted_drafter_ends_with_the_same_weights(short: Trained, tmp_path: Path) -> None:
    job = short.bench.job(tmp_path, short.kind, **SHORT)
    ending = at_call(len(ROWS) + 4, signal.SIGINT)
    with between_steps(ending) as progress, pytest.raises(KeyboardInterrupt):
        train_drafter(job, progress)
    seen: list[tuple[str, int]] = []
    train_drafter(job, lambda stage, done, total: seen.append((stage, done)))
    assert next(done for stage, done in seen if stage == "train") == 4
    assert same(tmp_path / "model.safetensors", short.folder / "model.safetensors")


@pytest.mark.usefixtures("_at_a_terminal")
def test_what_is_held_is_held_in_the_main_thread_alone() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred_signals():
            done.append("elsewhere")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    def interrupted() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("here")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["elsewhere", "here"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_checkpoint_outlives_deaths(tmp_path, monkeypatch, owner, name):
    checkpoints = Checkpoints(tmp_path / CHECKPOINT, {})
    checkpoints.save(Checkpoint([0.5], {"w": torch.ones(2)}, {}))
    monkeypatch.setattr(owner, name, failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(Checkpoint([0.5, 0.4], {"w": torch.zeros(2)}, {}))
    assert (found := checkpoints.load()) is not None
    assert found.step == 1


# --- Workers that share a fine-tune wait for their first ----------------------------------------


class Second:
    """The second of two workers, alone; it simulates the first one's part of collective calls."""

    rank, size = 1, 2

    def __init__(self, *done: Callable[[Sequence[torch.Tensor]], object]) -> None:
        self._done = iter(done)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        next(self._done, lambda tensors: None)(tensors)


class First:
    """The first of any number of workers."""

    rank, size = 0, 1

    def __init__(self, output: Path) -> None:
        self._output = output

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        with refused(FinetuneError, "another process"), claimed(self._output, FINETUNE):
            pass


def test_a_crew_goes_on_from_what_its_first_has(bench: Bench, killed: Path, tmp_path: Path) -> None:
    begin(bench.job(tmp_path / "dying"), 5)
    later, there, seen = tmp_path / "dying" / CHECKPOINT, killed / CHECKPOINT, list[int]()

    def save(tensors: object) -> None:  # the dying one's last, before the first has the claim
        shutil.copy(later, there)

    second = Second(save, lambda tensors: there.unlink())
    finetune(bench.job(killed), lambda stage, done, total: seen.append(done), second)
    assert seen == [4, 5, 6, 7, 8, 9]


def test_a_crew_that_begins_again_behind_its_result_tells_it(bench: Bench, killed: Path) -> None:
    job, seen = bench.job(killed), list[str]()
    found = finetune(job, group=First(killed))
    (killed / CHECKPOINT).touch()

    def look(stage: str, done: int, total: int | None) -> None:
        seen.append(stage)

    assert finetune(job, look, First(killed)) == found
    assert not (killed / CHECKPOINT).exists()
    assert finetune(job, look, Second(lambda tensors: tensors[0].add_(1))) == found
    assert not seen
    with pytest.raises(FinetuneError):
        finetune(bench.job(killed, epochs=1), group=First(killed))
