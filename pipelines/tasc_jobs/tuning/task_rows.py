"""A task's rows as token ids, from files or from its corpus in Redis. It indexes nothing."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Int32, Tokens
from tasc_draft.learning import answers
from tasc_jobs.errors import EmptyCorpusError
from tasc_runtime.rows import BadRow, Fields, read_corpus
from tasc_store import CorpusRow, CorpusStore
from tasc_text import PromptTemplate, TaskTokenizer

PROMPT_TOKENS = 3000  # the last ones of a prompt are kept
_BATCH = 1000


@dataclass(frozen=True)
class TaskRows:
    """Prompts, cut to their last 3,000 tokens, and whole outputs without end-of-sequence."""

    prompts: Tokens
    outputs: Tokens

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def tokens(self) -> int:
        return len(self.prompts.ids) + len(self.outputs.ids)

    def take(self, rows: NDArray[np.int64]) -> "TaskRows":
        return TaskRows(self.prompts.take(rows), self.outputs.take(rows))

    def answers(self, eos_id: int) -> list[tuple[Int32, Int32]]:
        """Prompt and answer of each row, the answer cut at 512 tokens, end-of-sequence on top."""
        return answers(self.prompts, self.outputs, eos_id)


@dataclass(frozen=True)
class FileRows:
    """The rows of files, and how many of their lines gave none."""

    rows: TaskRows
    refused: int


def from_files(
    paths: Sequence[Path],
    fields: Fields,
    tokenizer: TaskTokenizer,
    template: PromptTemplate | None = None,
    limit: int | None = None,
) -> FileRows:
    """Tokenise the rows of files, in order.

    Args:
        template: Without one, a row's prompt is its input as it is.
        limit: Take only so many rows.

    Raises:
        FileError: A file cannot be read.
        EmptyCorpusError: They hold no rows.
    """
    refused: list[BadRow] = []
    rows = encode(islice(read_corpus(paths, fields, refused.append), limit), tokenizer, template)
    if not len(rows):
        named = ", ".join(map(str, paths))
        raise EmptyCorpusError(f"no rows in {named}; {len(refused)} lines were refused")
    return FileRows(rows, len(refused))


def from_corpus(store: CorpusStore, rows: int) -> Iterator[CorpusRow]:
    """Rows ``[0, rows)`` of a corpus, or as many as there are."""
    for start in range(0, rows, _BATCH):
        yield from store.read(start, min(start + _BATCH, rows))


def encode(
    rows: Iterable[CorpusRow], tokenizer: TaskTokenizer, template: PromptTemplate | None
) -> TaskRows:
    """Token ids of rows; prompts with what the tokenizer puts in front of one."""
    prompts: list[Tokens] = []
    outputs: list[Tokens] = []
    rest = iter(rows)
    while batch := list(islice(rest, _BATCH)):
        texts = [template.render(row.input) if template else row.input for row in batch]
        encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=True)
        prompts.append(Tokens.of([e.ids[-PROMPT_TOKENS:] for e in encodings]))
        outputs.append(Tokens.of(tokenizer.encode_outputs([row.output for row in batch])))
    return TaskRows(_joined(prompts), _joined(outputs))


def _joined(parts: list[Tokens]) -> Tokens:
    if not parts:
        return Tokens.of([])
    return Tokens(
        np.concatenate([p.ids for p in parts]), np.concatenate([p.lengths for p in parts])
    )
