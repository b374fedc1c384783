"""Tests that a killed, interrupted or failed training resumes after its last complete step."""

import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from drafter_training import SHORT
from finetuning import ADAPTER, Bench, Made, begin, same
from support import files_up_to, refused
from tasc_runtime.progress import StageProgress, silent
from tasc_train.drafter.training_run import train_drafter
from tasc_train.errors import FinetuneError
from tasc_train.finetune.finetuning import CHECKPOINT, finetune
from tasc_train.finetune.training import Trainer, deferred_signals

Amid = Callable[[Callable[[], None]], AbstractContextManager[StageProgress]]


def test_killed_run_ends_with_the_weights_of_an_uninterrupted_run(
    bench: Bench, whole: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = bench.job(tmp_path)
    begin(job, 4)
    assert not (tmp_path / "finetune.json").exists()
    steps, messages = list[int](), list[str]()
    capsys.readouterr()
    finetune(job, lambda stage, done, total: steps.append(done), messages.append)
    assert steps[0] == 3  # the killed step had no checkpoint yet
    assert same(tmp_path / ADAPTER, whole.output / ADAPTER)
    assert not (tmp_path / CHECKPOINT).exists()
    assert len(messages) == 6
    assert all(re.fullmatch(r"loss \d+\.\d{3}, [\d,]+ tokens/s", text) for text in messages)
    err = capsys.readouterr().err
    assert "LoRA" in err
    assert "step 3 of 9" in err


def test_checkpoint_of_other_rows_settings_or_precision_is_refused(bench, killed, monkeypatch):
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda loss: loss * math.nan, ("step 3", "nan", "--learning-rate")),
        (lambda loss: loss.register_hook(lambda g: g * math.inf) and loss, ("gradient", "step 3")),
    ],
    ids=["loss", "gradient"],
)
def test_non_finite_loss_or_gradient_is_an_error_and_keeps_the_checkpoint(
    bench: Bench, killed: Path, monkeypatch: pytest.MonkeyPatch, change: Any, named: tuple[str, ...]
) -> None:
    before, loss = (killed / CHECKPOINT).read_bytes(), Trainer.loss
    monkeypatch.setattr(Trainer, "loss", lambda self, rows: change(loss(self, rows)))
    with refused(FinetuneError, *named):
        finetune(bench.job(killed))
    assert (killed / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize("kind", ["fine-tune", "drafter"])
def test_rows_that_are_all_too_long_and_folders_with_other_files_are_refused(
    bench, target, tmp_path, kind
):
    if kind == "fine-tune":
        job, run, file = bench.job, finetune, "README.md"
    else:
        job, run = partial(target.job, kind="eagle", **SHORT), train_drafter
        file = "model.safetensors"
    with refused(FinetuneError, "--max-length"):
        run(job(tmp_path / "out", max_length=3))
    # Another run may use the folder, but the answers of a target stay.
    assert (tmp_path / "out").exists() == (kind == "drafter")
    (tmp_path / file).write_text("mine")
    with refused(FinetuneError, file):
        run(job(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {file, "out"}
    assert (tmp_path / file).read_text() == "mine"


def test_full_disk_leaves_the_last_checkpoint(bench: Bench, killed: Path) -> None:
    before = (killed / CHECKPOINT).read_bytes()
    with files_up_to(4096), refused(FinetuneError, "step 2"):
        finetune(replace(bench.job(killed), checkpoint_s=0.0))
    assert (killed / CHECKPOINT).read_bytes() == before
    finetune(bench.job(killed))


def test_reported_seconds_and_tokens_include_the_time_before_a_resumption(
    bench: Bench, whole: Made, killed: Path
) -> None:
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


@pytest.mark.usefixtures("_at_a_terminal")
@pytest.mark.parametrize(
    ("amid", "call", "kept", "signum", "error"),
    [
        (in_a_step, 1, 0, signal.SIGINT, KeyboardInterrupt),
        (between_steps, 2, 2, signal.SIGINT, KeyboardInterrupt),
        (in_a_step, 5, 1, signal.SIGTERM, SystemExit),
        (in_a_change_of_weights, 3, 3, signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_interrupted_run_resumes_after_its_last_complete_step(
    bench: Bench, whole: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    amid: Amid, call: int, kept: int, signum: int, error: type[BaseException],
) -> None:  # fmt: skip
    with amid(at_call(call, signum)) as progress, pytest.raises(error):
        finetune(bench.job(tmp_path), progress)
    assert (f"step {kept} of 9" in capsys.readouterr().err) == bool(kept)
    assert (tmp_path / CHECKPOINT).exists() == bool(kept)
    steps: list[int] = []
    finetune(bench.job(tmp_path), lambda stage, done, total: steps.append(done))
    assert steps[0] == kept
    assert same(tmp_path / ADAPTER, whole.output / ADAPTER)


@pytest.mark.usefixtures("_at_a_terminal")
def test_signals_are_deferred_only_in_the_main_thread() -> None:
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
