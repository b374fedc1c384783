"""Writes the target's own bigrams to a file: runs the model on each token and stores the result.

One table serves all tasks with the same model and adapter. Making a table needs no corpus, no Redis
and no Ray.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasc_draft.index.bigrams import BigramTable, write_bigrams
from tasc_engine import EngineError, ModelSource
from tasc_engine.errors import UnsupportedModel
from tasc_engine.model.loading import load_model
from tasc_jobs.errors import JobError, require_writable
from tasc_text import TaskTokenizer


@torch.inference_mode()
def model_bigrams(
    model: Any,
    vocab_size: int,
    *,
    top: int = 8,
    max_logits: int = 1 << 25,
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Computes the most likely next tokens of each token, given as the only context.

    Source: Stewart et al. 2024, arXiv 2411.03786. One forward pass processes many one-token
    contexts.

    Args:
        model: A model of ``tasc_engine.model.loading.load_model``, on its device and with the
            adapter merged.
        vocab_size: V, the size of the tokenizer's vocabulary; larger ids are neither used as
            context nor listed.
        top: k, the number of next tokens.
        max_logits: Maximum number of logits of one forward pass, 4 bytes each.
        progress: Called with the number of further tokens that are done.

    Returns:
        ``int32[V, k]`` next tokens, the most likely first, and ``float32[V, k]`` their natural
        log-probabilities, from a softmax in float32 over all ids of the model.

    Raises:
        UnsupportedModel: The model has fewer ids than the tokenizer, or returns NaN in its dtype.
        ValueError: ``top`` is not between 1 and the vocabulary's size.
    """
    if not 1 <= top <= vocab_size:
        raise ValueError(
            f"top is {top}; it must be between 1 and {vocab_size}, the vocabulary's size"
        )
    embedded = int(model.config.get_text_config().vocab_size)
    if embedded < vocab_size:
        raise UnsupportedModel(
            f"the tokenizer has {vocab_size} ids and the model {embedded}; the model needs its "
            "own tokenizer in its folder"
        )
    tokens = np.empty((vocab_size, top), np.int32)
    logp = np.empty((vocab_size, top), np.float32)
    batch = max(1, max_logits // embedded)
    for begin in range(0, vocab_size, batch):
        part = slice(begin, min(begin + batch, vocab_size))
        ids = torch.arange(part.start, part.stop, device=model.device)[:, None]
        scores = model(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
        best = scores[:, :vocab_size].topk(top)
        tokens[part], logp[part] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        progress(part.stop - part.start)
    wrong = np.flatnonzero(np.isnan(logp[:, 0]))
    if len(wrong):
        raise UnsupportedModel(
            f"the model's log-probabilities after token {wrong[0]} are NaN in "
            f"{str(model.dtype).removeprefix('torch.')}; use float32"
        )
    return tokens, logp


@dataclass(frozen=True)
class BigramReport:
    """The table that was written, and the model's time in seconds, excluding loading."""

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


def make_bigrams(
    source: ModelSource,
    output: Path,
    *,
    name: str | None = None,
    top: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> BigramReport:
    """Computes a model's table and writes it; probabilities are float32 for any dtype.

    Args:
        name: Name of the model in the table; its folder if None.
        top: Number of next tokens kept for each token.
        progress: Called with the number of further tokens that are done.

    Raises:
        JobError: The file cannot be written, or the model is not supported.
        TextError: The model has no tokenizer.
        ValueError: ``top`` is larger than the vocabulary.
    """
    require_writable("--output", output)
    name = name or str(source.folder)
    tokenizer = TaskTokenizer.from_folder(source.folder)
    try:
        model = load_model(source)
        started = time.perf_counter()
        tokens, logp = model_bigrams(model, tokenizer.vocab_size, top=top, progress=progress)
    except EngineError as error:
        raise JobError(f"{name}: {error}") from error
    seconds = time.perf_counter() - started
    name = f"{name} with {source.adapter}" if source.adapter else name
    table = BigramTable(name, tokenizer.fingerprint, tokenizer.vocab_size, tokens, logp)
    write_bigrams(table, output)
    return BigramReport(
        file=str(output),
        model=name,
        fingerprint=table.fingerprint,
        vocab_size=table.vocab_size,
        top=top,
        bytes=output.stat().st_size,
        device=source.device,
        seconds=round(seconds, 3),
    )
