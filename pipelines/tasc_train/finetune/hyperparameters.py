"""Settings of a fine-tune. The defaults are from the paper (TASC, appendix B.2)."""

from dataclasses import dataclass
from typing import Annotated, Literal

Quantization = Literal["auto", "nf4", "none"]


@dataclass(frozen=True)
class Setting:
    """The help text and the limits of a setting that is also an option of a command.

    Machines that only train have no typer, so its option class cannot be used here.
    """

    help: str
    min: float | None = None
    max: float | None = None
    show_default: bool | str = True


BatchRows = Annotated[int, Setting(min=1, help="Rows per optimizer step.")]
MicroRows = Annotated[int, Setting(min=1, help="Rows per forward pass; fewer need less memory.")]


class LoopSettings:
    """The settings that every training loop reads; see `FinetuneSettings`."""

    epochs: float
    learning_rate: float
    batch_rows: int
    micro_rows: int
    seed: int


@dataclass(frozen=True)
class FinetuneSettings(LoopSettings):
    """The settings of a fine-tune, which are also options of a command.

    Together with the rows and the base model they determine the result.

    Attributes:
        epochs: Passes over the rows; 2.5 stops in the middle of the third.
        learning_rate: Learning rate of the first step; it decays linearly to 0.
        rank, alpha, dropout: Parameters of the LoRA adapter, which covers all linear layers of
            attention and feed-forward (Hu et al. 2022, arXiv 2106.09685).
        batch_rows: Rows per optimizer step.
        micro_rows: Rows per forward pass; affects memory and speed.
        max_length: Maximum tokens of prompt and output together; longer rows are left out and
            counted.
        quantization: Quantization of the frozen weights: ``nf4`` (QLoRA, Dettmers et al.
            2023, arXiv 2305.14314), ``none``, or ``auto``, which is ``nf4`` on a GPU and
            ``none`` on a CPU.
        seed: Seed of the row order, of the adapter's initial values and of dropout.
    """

    epochs: Annotated[float, Setting(min=0.01, max=1000, help="Passes over the rows.")] = 3.0
    learning_rate: Annotated[float, Setting(min=0, max=1, help="Initial learning rate.")] = 2e-4
    rank: Annotated[int, Setting(min=1, max=1024, help="LoRA rank.")] = 16
    alpha: Annotated[int, Setting(min=1, max=4096, help="LoRA alpha.")] = 16
    dropout: Annotated[float, Setting(min=0, max=0.9, help="LoRA dropout.")] = 0.2
    batch_rows: BatchRows = 64
    micro_rows: MicroRows = 8
    max_length: Annotated[
        int,
        Setting(min=2, help="Maximum tokens of prompt and output; longer rows are left out."),
    ] = 1024
    quantization: Annotated[
        Quantization,
        Setting(help="Quantization of the frozen weights; auto is nf4 on a GPU (QLoRA)."),
    ] = "auto"
    seed: Annotated[int, Setting(min=0, help="Seed of row order, adapter and dropout.")] = 0
