"""Rows as token ids, and the rows of each step."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tasc_text import TaskTokenizer, Template
from tasc_train.errors import FinetuneError
from tasc_train.finetune.hyperparameters import LoopSettings

if TYPE_CHECKING:  # training does not need the packages of the store
    from tasc_store import CorpusRow


@dataclass(frozen=True)
class Example:
    """One row: ``ids[:prompt]`` is the prompt; the output and end-of-sequence follow."""

    ids: tuple[int, ...]
    prompt: int


def examples_of(
    rows: Iterable["CorpusRow"], tokenizer: TaskTokenizer, template: Template, max_length: int
) -> tuple[list[Example], int]:
    """Returns the rows of at most ``max_length`` tokens as examples, and the number of longer rows.

    Raises:
        FinetuneError: The prompt of a row has no tokens.
    """
    found, too_long = list[Example](), 0
    for row in rows:
        prompt = template.encode(tokenizer, row.input)
        if not prompt:
            raise FinetuneError(
                f"the prompt of row {row.key!r} has no token; give it an input, or put text before "
                "{input} in --template"
            )
        (output,) = tokenizer.encode_outputs([row.output])
        example = Example((*prompt, *output, tokenizer.eos_id), len(prompt))
        if len(example.ids) > max_length:
            too_long += 1
        else:
            found.append(example)
    return found, too_long


def steps_of(rows: int, settings: LoopSettings) -> int:
    """Returns the number of optimizer steps of all epochs."""
    return math.ceil(settings.epochs * _steps_an_epoch(rows, settings))


def rows_of(step: int, lengths: Sequence[int], settings: LoopSettings) -> list[list[int]]:
    """Returns the rows of one step, in groups of similar length that share a forward pass.

    The result depends only on the arguments, so a resumed run takes the same rows.
    """
    epoch, at = divmod(step, _steps_an_epoch(len(lengths), settings))
    order = np.random.default_rng([settings.seed, epoch]).permutation(len(lengths))
    taken = order[at * settings.batch_rows : (at + 1) * settings.batch_rows].tolist()
    taken.sort(key=lambda row: (lengths[row], row))
    size = settings.micro_rows
    return [taken[start : start + size] for start in range(0, len(taken), size)]


def packed(examples: Sequence[Example], prompt_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """Packs rows into one tensor. Padding follows each row, so no token of the row attends to it.

    Returns:
        The ids ``int64[R, L]``, and the weights ``float32[R, L - 1]`` of the loss on the token
        after each id: 1 in answers, ``prompt_weight`` in prompts, 0 after a row's end.
    """
    longest = max(len(e.ids) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    weights = torch.zeros(len(examples), longest - 1)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        weights[row, : e.prompt - 1] = prompt_weight
        weights[row, e.prompt - 1 : len(e.ids) - 1] = 1.0
    return ids, weights


def digest_of(examples: Iterable[Example]) -> str:
    """Returns a digest of the examples in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.prompt, example.ids)).encode())
    return digest.hexdigest()


def _steps_an_epoch(rows: int, settings: LoopSettings) -> int:
    return math.ceil(rows / settings.batch_rows)
