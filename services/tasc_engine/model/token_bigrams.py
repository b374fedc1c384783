"""What a model says after each single token: the target's own bigrams.

Stewart et al. 2024, arXiv 2411.03786. One forward over many contexts of one token each. It knows
models; what a draft makes of the table is not its business.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tasc_engine.errors import UnsupportedModel

_LOGITS = 1 << 25  # of one forward: 128 MB in float32


@torch.inference_mode()
def model_bigrams(
    model: Any,
    vocab_size: int,
    *,
    top: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The likeliest next tokens of each token when it is all the model sees.

    Args:
        model: What ``tasc_engine.model.loading.load_model`` gives: adapter merged, on its device.
        vocab_size: The tokenizer's, V; ids beyond it are neither asked for nor listed.
        top: How many next tokens, k.
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
    batch = max(1, _LOGITS // embedded)
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
