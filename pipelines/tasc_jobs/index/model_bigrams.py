"""The target's own bigrams as a file: load a model, ask it about every token, write the table.

One table serves all tasks of the model with that adapter. It needs no corpus, no Redis and no Ray.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tasc_draft.index.bigrams import BigramTable, write_bigrams
from tasc_engine import EngineError, ModelSource
from tasc_engine.model.loading import DTYPES, load_model
from tasc_engine.model.token_bigrams import model_bigrams
from tasc_jobs.errors import JobError
from tasc_jobs.task_inputs import device_here, named_source
from tasc_runtime.errors import FileError
from tasc_text import TaskTokenizer, resolve_folder


@dataclass(frozen=True)
class BigramJob:
    """What to make a table of.

    Attributes:
        model: Folder or hub name.
        adapter: PEFT adapter to merge, folder or hub name.
        dtype: float32, bfloat16, float16 or float64; the probabilities are float32 in any case.
        device: A torch device; ``auto`` is a GPU if there is one.
        top: Next tokens kept of each token.
    """

    model: str
    adapter: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    top: int = 8


@dataclass(frozen=True)
class BigramReport:
    """What was written, and how long the model took for it, in seconds without its loading."""

    file: str
    model: str
    fingerprint: str
    vocab_size: int
    top: int
    bytes: int
    device: str
    seconds: float

    @property
    def in_words(self) -> str:
        return (
            f"{self.file}: {self.top} next tokens of each of {self.vocab_size:,}, "
            f"{self.bytes / 1e6:.1f} MB, in {self.seconds:.1f} s on {self.device}"
        )


def vocabulary(model: str) -> int:
    """How many tokens a model will be asked about."""
    return TaskTokenizer.from_folder(resolve_folder(model, weights=False)).vocab_size


def make_bigrams(
    job: BigramJob, output: Path, progress: Callable[[int], None] = lambda tokens: None
) -> BigramReport:
    """Make a model's table and write it.

    Args:
        progress: Told how many more tokens are done.

    Raises:
        FileError: The output's folder does not exist.
        JobError: The device or the dtype does not exist, or the model is not supported.
        TextError: The model or its tokenizer cannot be found.
        ValueError: ``top`` is larger than the vocabulary.
    """
    if not output.absolute().parent.is_dir():
        raise FileError(f"{output} cannot be written: its folder does not exist; make it first")
    source = _source(job)
    tokenizer = TaskTokenizer.from_folder(source.folder)
    try:
        model = load_model(source)
        started = time.perf_counter()
        tokens, logp = model_bigrams(model, tokenizer.vocab_size, top=job.top, progress=progress)
    except EngineError as error:
        raise JobError(f"{job.model}: {error}") from error
    seconds = time.perf_counter() - started
    name = f"{job.model} with {job.adapter}" if job.adapter else job.model
    table = BigramTable(name, tokenizer.fingerprint, tokenizer.vocab_size, tokens, logp)
    write_bigrams(table, output)
    return BigramReport(
        file=str(output),
        model=name,
        fingerprint=table.fingerprint,
        vocab_size=table.vocab_size,
        top=job.top,
        bytes=output.stat().st_size,
        device=source.device,
        seconds=round(seconds, 3),
    )


def _source(job: BigramJob) -> ModelSource:
    if job.dtype not in DTYPES:
        raise JobError(f"dtype is {job.dtype!r}; use one of {', '.join(DTYPES)}")
    try:
        torch.empty(0, device=device_here(job.device))
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise JobError(f"device {job.device!r} cannot be used ({why}); try cpu") from error
    return named_source(job.model, job.adapter, job.dtype, job.device)
