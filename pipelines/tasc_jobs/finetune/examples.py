"""Rows as token ids, and which of them each step takes."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tasc_jobs.errors import FinetuneError
from tasc_jobs.finetune.hyperparameters import LoopSettings
from tasc_text import TaskTokenizer, Template

if TYPE_CHECKING:  # a store's packages are not needed to learn
    from tasc_store import CorpusRow


@dataclass(frozen=True)
class Example:
    """One row: ``ids[:prompt]`` the prompt, then the output and the end-of-sequence."""

    ids: tuple[int, ...]
    prompt: int


def examples_of(
    rows: Iterable["CorpusRow"], tokenizer: TaskTokenizer, template: Template, max_length: int
) -> tuple[list[Example], int]:
    """The rows that are not too long, and how many are.

    Raises:
        FinetuneError: A row's prompt has no token that its output could be said behind.
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
    """Steps of the optimizer in all epochs."""
    return math.ceil(settings.epochs * _steps_an_epoch(rows, settings))


def rows_of(step: int, lengths: Sequence[int], settings: LoopSettings) -> list[list[int]]:
    """The rows of one step, by those that go through the model together; of like length.

    It depends on nothing but its arguments: a run that is resumed takes what it would have taken.
    """
    epoch, at = divmod(step, _steps_an_epoch(len(lengths), settings))
    order = np.random.default_rng([settings.seed, epoch]).permutation(len(lengths))
    taken = order[at * settings.batch_rows : (at + 1) * settings.batch_rows].tolist()
    taken.sort(key=lambda row: (lengths[row], row))
    size = settings.micro_rows
    return [taken[start : start + size] for start in range(0, len(taken), size)]


def packed(examples: Sequence[Example], prompt_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """Rows padded at their end, which a causal model does not attend to.

    Returns:
        ``int64[R, L]`` ids, and ``float32[R, L - 1]`` how much it matters to say the token behind
        each: 1 in answers, ``prompt_weight`` in prompts, 0 behind a row's end.
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
    """Who these are, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.prompt, example.ids)).encode())
    return digest.hexdigest()


def _steps_an_epoch(rows: int, settings: LoopSettings) -> int:
    return math.ceil(rows / settings.batch_rows)
