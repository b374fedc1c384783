"""A training that Ctrl-C or SIGTERM ends keeps every whole step, wherever in a step it came."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

import drafter_training
import finetuning
from tasc_engine.neural.card import Kind
from tasc_jobs.drafter.job import train_drafter
from tasc_jobs.finetune.checkpoints import Checkpoint, Checkpoints
from tasc_jobs.finetune.interrupts import held
from tasc_jobs.finetune.job import CHECKPOINT, finetune
from tasc_jobs.finetune.training import Trainer
from tasc_jobs.stages import StageProgress, silent

Amid = Callable[[Callable[[], None]], AbstractContextManager[StageProgress]]
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C does what it does at a terminal; a job in the background begins deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> finetuning.Bench:
    return finetuning.make(tmp_path_factory.mktemp("bench"), "qwen2")


@pytest.fixture(scope="module")
def whole(bench: finetuning.Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run made that nothing ended."""
    output = tmp_path_factory.mktemp("whole")
    finetune(bench.job(output))
    return output


@pytest.fixture(autouse=True)
def _exits() -> Iterator[None]:
    """SIGTERM asks for an exit, as in the command."""
    before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    yield
    signal.signal(signal.SIGTERM, before)


def at_call(number: int, signum: int) -> Callable[[], None]:
    """Sends a signal when it is called for the so-manieth time."""
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
    """Before each part of its rows."""
    loss = Trainer._loss

    def called(self: Trainer, rows: Any) -> torch.Tensor:
        call()
        return loss(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_loss", called)
        yield silent


@contextmanager
def in_a_change_of_weights(call: Callable[[], None]) -> Iterator[StageProgress]:
    hook = register_optimizer_step_post_hook(lambda *args: call())
    try:
        yield silent
    finally:
        hook.remove()


def same(one: Path, other: Path, file: str) -> bool:
    first, second = load_file(one / file), load_file(other / file)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize(
    ("signum", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize(
    ("amid", "call", "kept"),
    [(between_steps, 2, 2), (in_a_step, 5, 1), (in_a_change_of_weights, 3, 3)],
)
def test_an_interrupted_run_goes_on_behind_its_last_whole_step(
    bench: finetuning.Bench, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    amid: Amid, call: int, kept: int, signum: int, ends: type[BaseException],
) -> None:  # fmt: skip
    with amid(at_call(call, signum)) as progress, pytest.raises(ends):
        finetune(bench.job(tmp_path), progress)
    assert f"step {kept} of 9 is kept" in capsys.readouterr().err
    seen: list[int] = []
    finetune(bench.job(tmp_path), lambda stage, done, total: seen.append(done))
    assert seen[0] == kept
    assert same(tmp_path, whole, ADAPTER)


@pytest.mark.parametrize("kind", ["eagle", "independent"])
def test_an_interrupted_drafter_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, kind: Kind
) -> None:
    drafters = drafter_training.make(tmp_path / "target", "qwen2")
    train_drafter(drafters.job(tmp_path / "whole", kind, epochs=2))
    job = drafters.job(tmp_path / "ended", kind, epochs=2)
    ending = at_call(len(drafter_training.ROWS) + 4, signal.SIGINT)
    with between_steps(ending) as progress, pytest.raises(KeyboardInterrupt):
        train_drafter(job, progress)
    seen: list[tuple[str, int]] = []
    train_drafter(job, lambda stage, done, total: seen.append((stage, done)))
    assert next(done for stage, done in seen if stage == "train") == 4
    assert same(job.output, tmp_path / "whole", "model.safetensors")


def test_a_run_that_ends_before_its_first_step_begins_again(
    bench: finetuning.Bench, whole: Path, tmp_path: Path
) -> None:
    with in_a_step(at_call(1, signal.SIGINT)) as progress, pytest.raises(KeyboardInterrupt):
        finetune(bench.job(tmp_path), progress)
    assert not (tmp_path / CHECKPOINT).exists()
    finetune(bench.job(tmp_path))
    assert same(tmp_path, whole, ADAPTER)


def test_what_is_held_is_held_in_the_main_thread_alone() -> None:
    done: list[str] = []

    def work() -> None:
        with held():
            done.append("elsewhere")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    def interrupted() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            done.append("here")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["elsewhere", "here"]


def test_a_checkpoint_is_there_however_often_its_place_is_half_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Path, target: Path) -> NoReturn:
        raise KeyboardInterrupt

    folder = tmp_path / CHECKPOINT
    checkpoints = Checkpoints(folder, {})
    checkpoints.save(Checkpoint(1, [0.5], {"w": torch.ones(2)}, {}))
    folder.rename(folder.with_name(folder.name + ".older"))  # as a run leaves it that died here
    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(Checkpoint(2, [0.5, 0.4], {"w": torch.zeros(2)}, {}))
    assert (found := checkpoints.load()) is not None
    assert found.step == 1
