"""How often each token stands in some answers, by a tokenizer: of one batch, of a file, summed.

No token is counted that ends an answer unless it is written in one; that is added at the end, once
for each answer. It needs no Ray.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasc_draft.tokens import Int64, Tokens
from tasc_jobs.runtime.stages import StageProgress
from tasc_runtime.models import load_tokenizer
from tasc_runtime.rows import BadRow, Fields, check_file, read_rows
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer
from tasc_text.tokenizer_file import open_tokenizer

TokenizerOf: TypeAlias = TaskRecord | Path
"""The task whose model has it, or where it lies."""
BATCH_ROWS = 500


@functools.cache
def open_tokens(named: TokenizerOf) -> TaskTokenizer:
    """Loaded once per process.

    Raises:
        ServiceError: It is not the one the task was registered with.
        TextError: It cannot be loaded.
    """
    return load_tokenizer(named) if isinstance(named, TaskRecord) else open_tokenizer(named)


@dataclass
class TokenCounts:
    """A sum of counts.

    Attributes:
        counts: ``int64[vocab_size]``.
        read: Rows looked at.
        rows: Those counted.
    """

    vocab_size: int
    read: int = 0
    rows: int = 0
    counts: Int64 = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.vocab_size, np.int64)

    def add(self, ids: NDArray[np.int32], counts: Int64, read: int, rows: int) -> None:
        """Args: ``ids``: each once."""
        self.counts[ids] += counts
        self.read += read
        self.rows += rows

    def with_ends(self, eos_id: int) -> Int64:
        """The counts, and one end of sequence for each answer."""
        if eos_id >= self.vocab_size:
            raise ValueError(
                f"end of sequence {eos_id} is no token of the vocabulary of {self.vocab_size}; "
                "set eos_token_id in config.json to one of the tokenizer's"
            )
        counts = self.counts.copy()
        counts[eos_id] += self.rows
        return counts


def count_texts(tokenizer: TaskTokenizer, texts: Sequence[str]) -> tuple[NDArray[np.int32], Int64]:
    """The tokens of some texts, each once, and how often they stand there."""
    return np.unique(Tokens.of(tokenizer.encode_outputs(texts)).ids, return_counts=True)


def count_file(
    path: Path, field_name: str, named: TokenizerOf, progress: StageProgress
) -> TokenCounts:
    """Counts of a file's answers; lines that hold none are passed over.

    Args:
        progress: Told of one stage, ``count``, whose end nobody knows.

    Raises:
        FileError: The file cannot be read.
    """
    check_file(path, (field_name,))
    tokenizer = open_tokens(named)
    total = TokenCounts(tokenizer.vocab_size)
    answers = _answers(path, field_name)
    while batch := list(islice(answers, BATCH_ROWS)):
        texts = [text for text in batch if text is not None]
        total.add(*count_texts(tokenizer, texts), len(batch), len(texts))
        progress("count", total.read, None)
    return total


def _answers(path: Path, field_name: str) -> Iterator[str | None]:
    # An answer's input matters not; its own field stands for one, which every row has.
    for row in read_rows(path, Fields(field_name, field_name)):
        yield None if isinstance(row, BadRow) else row.output
