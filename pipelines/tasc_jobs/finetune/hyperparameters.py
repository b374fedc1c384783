"""Settings of a fine-tune. The defaults are those of the paper (TASC, appendix B.2)."""

from dataclasses import dataclass
from typing import Literal, Protocol

Quantization = Literal["auto", "nf4", "none"]


class Pace(Protocol):
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
    """What a fine-tune is reproducible by, with its rows and its base model.

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

    epochs: float = 3.0
    learning_rate: float = 2e-4
    rank: int = 16
    alpha: int = 16
    dropout: float = 0.2
    batch_rows: int = 64
    micro_rows: int = 8
    max_length: int = 1024
    quantization: Quantization = "auto"
    seed: int = 0
