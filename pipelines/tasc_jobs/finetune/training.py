"""The training loop: one step of the optimizer after the other, each a function of its number.

Which rows a step takes and what dropout drops depend on the seed and the step alone, so a run that
was killed and resumed, and one that several workers share, computes what one undisturbed process
does. It reads no files.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tasc_jobs.finetune.checkpoints import Checkpoint
from tasc_jobs.finetune.errors import FinetuneError
from tasc_jobs.finetune.examples import IGNORED, Example, batch_of, rows_of, steps_of
from tasc_jobs.finetune.hyperparameters import Pace
from tasc_jobs.finetune.interrupts import held
from tasc_jobs.finetune.memory import memory_to
from tasc_jobs.finetune.model import head_at, trained

_MOST_NORM = 1.0  # of a gradient


@dataclass(frozen=True)
class TrainingProgress:
    """What a step was like.

    Attributes:
        loss: Mean over the tokens of its outputs, in nats.
        tokens: That went through the model.
    """

    step: int
    steps: int
    loss: float
    tokens: int


class Crew(Protocol):
    """Processes that share a step: each takes a part of its rows, and all add what they found."""

    rank: int
    size: int

    def sum(self, tensors: Sequence[Tensor]) -> None: ...


class Alone:
    """A crew of one."""

    rank, size = 0, 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """There is nobody to add."""


class Trainer:
    """A model on its way through all steps.

    Args:
        model: What of it wants a gradient is trained; a PEFT model, unless `_loss` is another.
    """

    def __init__(
        self,
        model: Any,
        examples: Sequence[Example],
        settings: Pace,
        crew: Crew | None = None,
    ) -> None:
        self.model, self._examples, self._settings = model, examples, settings
        self._crew = crew or Alone()
        self._lengths = [len(e.ids) for e in examples]
        self._weights = trained(model)
        self._device = next(iter(self._weights.values())).device
        self.steps = steps_of(len(examples), settings)
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=settings.learning_rate)
        self._losses: list[float] = []

    @property
    def checkpoint(self) -> Checkpoint:
        weights = {name: value.detach().contiguous() for name, value in self._weights.items()}
        return Checkpoint(len(self._losses), self._losses, weights, self._optimizer.state_dict())

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on behind a checkpoint of the same run."""
        with torch.no_grad():
            for name, value in self._weights.items():
                value.copy_(checkpoint.weights[name])
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self._losses = list(checkpoint.losses)

    def run(self, tell: Callable[[TrainingProgress], None] = lambda told: None) -> None:
        """Take all steps that are left.

        Raises:
            FinetuneError: The loss or a gradient is no number, or there is too little memory.
        """
        self.model.train()
        rows = f"train {self._settings.micro_rows} rows of up to {max(self._lengths)} tokens"
        way_out = "take fewer with --micro-rows, or shorter ones with --max-length"
        for step in range(len(self._losses), self.steps):
            with memory_to(rows, way_out):
                told = self._step(step)
            tell(told)

    def _step(self, step: int) -> TrainingProgress:
        taken = rows_of(step, self._lengths, self._settings)
        labels = sum(len(e.ids) - e.prompt for rows in taken for e in self._at(rows))
        total = torch.zeros((), device=self._device)
        for at in range(self._crew.rank, len(taken), self._crew.size):
            torch.manual_seed(hash((self._settings.seed, step, at)))
            loss = self._loss(taken[at]) / labels
            loss.backward()
            total += loss.detach()
        gradients = [_gradient(value) for value in self._weights.values()]
        self._crew.sum([*gradients, total])
        norm = torch.nn.utils.clip_grad_norm_(self._weights.values(), _MOST_NORM)
        mean = total.item()
        for what, found in (("loss", mean), ("gradient's norm", norm.item())):
            if not math.isfinite(found):
                raise FinetuneError(
                    f"the {what} of step {step + 1} of {self.steps} is {found}; the last "
                    "checkpoint stays, begin again with a lower --learning-rate in another output"
                )
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * self._share(step)
        with held():  # whoever is interrupted has weights and losses of the same step
            self._optimizer.step()
            self._losses.append(mean)
        self._optimizer.zero_grad(set_to_none=True)
        tokens = sum(self._lengths[row] for rows in taken for row in rows)
        return TrainingProgress(step + 1, self.steps, mean, tokens)

    def _share(self, step: int) -> float:
        """Of the learning rate."""
        return 1 - step / self.steps

    def _loss(self, rows: Sequence[int]) -> Tensor:
        """Summed over the tokens of the outputs; the LM head runs where there are some."""
        batch = batch_of(self._at(rows))
        ids, labels = batch.ids.to(self._device), batch.labels.to(self._device)
        said = labels != IGNORED
        # Padding stands behind a row's end, where a causal model looks from nowhere: no mask.
        with head_at(self.model, said):
            logits = self.model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[0].float(), labels[said], reduction="sum")

    def _at(self, rows: Sequence[int]) -> list[Example]:
        return [self._examples[row] for row in rows]


def _gradient(value: torch.nn.Parameter) -> Tensor:
    """One that no row gave anything to is zero."""
    if value.grad is None:
        value.grad = torch.zeros_like(value)
    return value.grad
