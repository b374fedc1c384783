"""Options that several training commands share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tasc_jobs.cli.options import Device, MaxModelLen, Threads, TrainOptions
from tasc_jobs.tasks.options import PromptOptions

if TYPE_CHECKING:
    from tasc_jobs.task_inputs import InputOptions
    from tasc_train.enrich.ngram_selection import EnrichSettings
    from tasc_train.evaluate.measured_model import Setup

CheckpointS = Annotated[float, typer.Option(min=1, help="Seconds between two checkpoints.")]


@dataclass(frozen=True)
class ModelAndPrompt(PromptOptions):
    """Options for the model and its prompt. An option that was not given is None."""

    model: Annotated[str | None, typer.Option(help="Model: folder or Hugging Face name.")] = None

    def inputs(self, task: str | None, data: TrainOptions, **more: Any) -> "InputOptions":
        """Returns the inputs of a job; ``more`` are further fields of `InputOptions`."""
        from tasc_jobs.task_inputs import InputOptions

        return InputOptions(task, **vars(self), files=data.files, fields=data.fields, **more)


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine that a command runs."""

    rows: Annotated[
        int, typer.Option(min=1, max=4096, help="b, the number of rows decoded together.")
    ] = 8
    max_model_len: MaxModelLen = None
    device: Device = "auto"
    threads: Threads = 1

    @property
    def setup(self) -> "Setup":
        from tasc_train.evaluate.measured_model import Setup

        return Setup(self.rows, self.max_model_len, self.threads)


@dataclass(frozen=True)
class NgramOptions:
    """Options of the n-grams that become tokens."""

    n_max: Annotated[
        int, typer.Option(min=2, max=16, help="Maximum number of tokens that a new token replaces.")
    ] = 4
    pcs: Annotated[
        float,
        typer.Option(
            max=1,
            help="Leave out n-grams with a prefix collision score of at least this number, which "
            "must be above 0; 1 leaves out none.",
        ),
    ] = 0.02
    pcs_rule: Annotated[
        Literal["suffix", "whole"],
        typer.Option(
            help="Tokens that collide with an n-gram: those that start with its last token "
            "(suffix), or with the whole n-gram (whole)."
        ),
    ] = "suffix"

    def settings(self, budget: int) -> "EnrichSettings":
        from tasc_train.enrich.ngram_selection import EnrichSettings

        return EnrichSettings(budget, self.n_max, self.pcs, self.pcs_rule)
