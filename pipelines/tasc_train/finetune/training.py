"""The training loop.

The rows of a step and the random numbers of dropout depend only on the seed and the number of the
step. So a resumed run computes the same as an uninterrupted one.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasc_engine.errors import is_out_of_memory
from tasc_runtime.progress import StageProgress, note
from tasc_train.errors import FinetuneError
from tasc_train.finetune.checkpoints import Checkpoint, Checkpoints
from tasc_train.finetune.examples import Example, packed, rows_of, steps_of
from tasc_train.finetune.hyperparameters import LoopSettings
from tasc_train.finetune.model import head_at, trained

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MAX_NORM = 1.0  # of the gradient
_LAST_LOSSES = 10  # number of last steps in the reported mean loss of a run


@dataclass(frozen=True)
class TrainingProgress:
    """The figures of a step.

    Attributes:
        loss: Mean loss over the tokens of the step's outputs, in nats.
        tokens: Number of tokens that the model processed.
    """

    step: int
    steps: int
    loss: float
    tokens: int


class Trainer:
    """Trains a model through all steps.

    Args:
        model: A PEFT model, or the model of a subclass. Parameters that require a gradient are
            trained.
    """

    def __init__(self, model: Any, examples: Sequence[Example], settings: LoopSettings) -> None:
        self.model, self._examples, self._settings = model, examples, settings
        self._lengths = [len(e.ids) for e in examples]
        self._weights = trained(model)
        self._device = next(iter(self._weights.values())).device
        self.steps = steps_of(len(examples), settings)
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=settings.learning_rate)
        self._losses: list[float] = []
        self.tokens, self._begun = 0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the whole run, including those before a resumption."""
        return time.monotonic() - self._begun

    @property
    def checkpoint(self) -> Checkpoint:
        weights = {name: value.detach() for name, value in self._weights.items()}
        optimizer = self._optimizer.state_dict()
        return Checkpoint(self._losses, weights, optimizer, self.seconds, self.tokens)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue after a checkpoint of the same run."""
        with torch.no_grad():
            for name, value in self._weights.items():
                value.copy_(checkpoint.weights[name])
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self._losses = list(checkpoint.losses)
        self.tokens, self._begun = checkpoint.tokens, time.monotonic() - checkpoint.seconds

    def run(self) -> Iterator[TrainingProgress]:
        """Run the remaining steps, one by one.

        Raises:
            FinetuneError: The loss or a gradient is not finite, or there is too little memory.
        """
        self.model.train()
        rows = f"train {self._settings.micro_rows} rows of up to {max(self._lengths)} tokens"
        way_out = "take fewer with --micro-rows, or shorter ones with --max-length"
        for step in range(len(self._losses), self.steps):
            with memory_to(rows, way_out):
                done = self._step(step)
            yield done

    def _step(self, step: int) -> TrainingProgress:
        taken = rows_of(step, self._lengths, self._settings)
        labels = sum(len(e.ids) - e.prompt for rows in taken for e in self._at(rows))
        total = torch.zeros((), device=self._device)
        for at, rows in enumerate(taken):
            torch.manual_seed(hash((self._settings.seed, step, at)))
            loss = self.loss(rows) / labels
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), _MAX_NORM)
        mean = total.item()
        for name, value in (("loss", mean), ("norm of the gradient", norm.item())):
            if not math.isfinite(value):
                raise FinetuneError(
                    f"the {name} of step {step + 1} of {self.steps} is {value}; the last "
                    "checkpoint is kept; start again with a lower --learning-rate and another "
                    "--output"
                )
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * self._share(step)
        tokens = sum(self._lengths[row] for rows in taken for row in rows)
        with deferred_signals():  # keeps weights and losses at the same step
            self._optimizer.step()
            self._losses.append(mean)
            self.tokens += tokens
        self._optimizer.zero_grad(set_to_none=True)
        return TrainingProgress(step + 1, self.steps, mean, tokens)

    def _share(self, step: int) -> float:
        """Returns the fraction of the configured learning rate that this step uses."""
        return 1 - step / self.steps

    def loss(self, rows: Sequence[int]) -> Tensor:
        """Returns the summed loss of the outputs' tokens.

        The LM head runs only for these tokens.
        """
        ids, weights = (each.to(self._device) for each in packed(self._at(rows)))
        is_output = weights > 0
        # No mask is needed: padding follows each row, so no token of the row attends to it.
        with head_at(self.model, is_output):
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        targets = ids[:, 1:][is_output]
        return torch.nn.functional.cross_entropy(logits[0].float(), targets, reduction="sum")

    def _at(self, rows: Sequence[int]) -> list[Example]:
        return [self._examples[row] for row in rows]


def run_through(
    trainer: Trainer,
    checkpoints: Checkpoints,
    every_s: float,
    progress: StageProgress,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the remaining steps, and return the figures of the whole run.

    No complete step is lost after Ctrl-C or an exit by a signal.

    Args:
        every_s: Seconds between two checkpoints.
        notify: Called with messages about the progress of the training.

    Raises:
        FinetuneError: See `Trainer.run`; or a checkpoint cannot be written.
    """
    saved = time.monotonic()
    progress("train", trainer.checkpoint.step, trainer.steps)
    try:
        for done in trainer.run():
            rate = trainer.tokens / max(trainer.seconds, 1e-9)
            notify(f"loss {done.loss:.3f}, {rate:,.0f} tokens/s")
            progress("train", done.step, done.steps)
            if time.monotonic() - saved > every_s:
                checkpoints.save(trainer.checkpoint)
                saved = time.monotonic()
        checkpoints.save(trainer.checkpoint)
    except (KeyboardInterrupt, SystemExit):
        _save_complete_steps(trainer, checkpoints)
        raise
    losses = trainer.checkpoint.losses
    last = losses[-_LAST_LOSSES:]
    seconds = trainer.seconds
    return {
        "steps": trainer.steps,
        "first_loss": losses[0],
        "loss": sum(last) / len(last),
        "tokens_per_second": trainer.tokens / seconds if seconds else 0.0,
        "seconds": seconds,
    }


def _save_complete_steps(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """Save the complete steps of an interrupted run, and log the success or failure."""
    if not (step := trainer.checkpoint.step):
        return
    try:
        checkpoints.save(trainer.checkpoint)
        note(f"step {step} of {trainer.steps} is saved; the same command resumes after it")
    except FinetuneError as error:
        note(str(error))


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defers signals that arrive during the block to its end.

    Outside the main thread nothing is deferred, because signals do not interrupt other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for each in _SIGNALS:
            before[each] = signal.signal(each, lambda signum, _: received.append(signum))
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for signum in received:
            signal.raise_signal(signum)


@contextmanager
def memory_to(action: str, way_out: str) -> Iterator[None]:
    """Raise torch's out-of-memory errors as FinetuneError; other errors are not changed.

    Args:
        action: The action of the block, such as "load the model".
        way_out: The solution that the message gives.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FinetuneError(f"too little memory to {action}; {way_out}") from error
