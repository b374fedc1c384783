"""The target's own bigrams as a file: load a model, ask it about every token, write the table.

One table serves all tasks of the model with that adapter. It needs no corpus, no Redis and no Ray.
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
    """The likeliest next tokens of each token when it is all the model sees.

    Source: Stewart et al. 2024, arXiv 2411.03786. One forward holds many contexts of one token.

    Args:
        model: What ``tasc_engine.model.loading.load_model`` gives: adapter merged, on its device.
        vocab_size: The tokenizer's, V; ids beyond it are neither asked for nor listed.
        top: How many next tokens, k.
        max_logits: Most logits of one forward, 4 bytes each.
        progress: Told how many more tokens are done.

    Returns:
        ``int32[V, k]`` next tokens, the likeliest first, and ``float32[V, k]`` their natural
        log-probabilities, a softmax in float32 over all the model's ids.

    Raises:
        UnsupportedModel: The model has fewer ids than the tokenizer, or gives NaN in its dtype.
        ValueError: ``top`` is not between 1 and the vocabulary's size.
    """
    if not 1 <= top <= vocab_size:
        raise ValueError(f"top is {top}; it must lie between 1 and {vocab_size}, the vocabulary")
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
            f"what the model gives after token {wrong[0]} is not a number in "
            f"{str(model.dtype).removeprefix('torch.')}; use float32"
        )
    return tokens, logp


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


def make_bigrams(
    source: ModelSource,
    output: Path,
    *,
    name: str | None = None,
    top: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> BigramReport:
    """Make a model's table and write it; its probabilities are float32 in any dtype.

    Args:
        name: What the table calls the model; its folder if None.
        top: Next tokens kept of each token.
        progress: Told how many more tokens are done.

    Raises:
        JobError: No file can be written there, or the model is not supported.
        TextError: It has no tokenizer.
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
