"""Settings of a fine-tune. The defaults are those of the paper (TASC, appendix B.2)."""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from typer import Option

Quantization = Literal["auto", "nf4", "none"]
BatchRows = Annotated[int, Option(min=1, help="Rows of one step.")]
MicroRows = Annotated[int, Option(min=1, help="Rows at the same time; fewer need less memory.")]


class LoopSettings(Protocol):
    """What the loop of any training reads of its settings; see `FinetuneSettings`."""

    @property
    def epochs(self) -> float: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def batch_rows(self) -> int: ...

    @property
    def micro_rows(self) -> int: ...

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class FinetuneSettings:
    """What a fine-tune is reproducible by, with its rows and its base model; options of a command.

    Attributes:
        epochs: Passes over the rows; 2.5 ends in the middle of the third.
        learning_rate: At the first step; it falls to 0 in a straight line.
        rank, alpha, dropout: Of the LoRA adapter, on all linear layers of attention and
            feed-forward (Hu et al. 2022, arXiv 2106.09685).
        batch_rows: Rows of one step of the optimizer.
        micro_rows: Rows that go through the model together: a matter of memory and speed.
        max_length: Tokens of prompt and output together; longer rows are left out, and counted.
        quantization: Of the frozen weights: ``nf4`` (QLoRA, Dettmers et al. 2023, arXiv
            2305.14314), ``none``, or ``auto``: ``nf4`` on a GPU.
        seed: Of the order of rows, the adapter's first values, and what dropout drops.
    """

    epochs: Annotated[float, Option(min=0.01, max=1000, help="Passes over the rows.")] = 3.0
    learning_rate: Annotated[float, Option(min=0, max=1, help="At the first step.")] = 2e-4
    rank: Annotated[int, Option(min=1, max=1024, help="Of the LoRA adapter.")] = 16
    alpha: Annotated[int, Option(min=1, max=4096, help="Of the LoRA adapter.")] = 16
    dropout: Annotated[float, Option(min=0, max=0.9, help="Of the LoRA adapter.")] = 0.2
    batch_rows: BatchRows = 64
    micro_rows: MicroRows = 8
    max_length: Annotated[
        int, Option(min=2, help="Tokens of prompt and output; longer rows are left out.")
    ] = 1024
    quantization: Annotated[
        Quantization, Option(help="Of the frozen weights; auto is nf4 on a GPU (QLoRA).")
    ] = "auto"
    seed: Annotated[int, Option(min=0, help="Of the rows' order and of dropout.")] = 0
