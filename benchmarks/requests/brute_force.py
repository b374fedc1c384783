"""The probabilities of labels by transformers, each label in a sequence of its own."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DynamicCache

from tasc_text import TaskTokenizer

Float64 = NDArray[np.float64]
_PADDING, _ANY_END = -2, -1  # among the targets of a label


class BruteForce:
    """A model of transformers and the labels.

    Args:
        end: See `LLM.classify`.
    """

    def __init__(self, model: Any, known: TaskTokenizer, labels: Sequence[str], end: str | None):
        self.model, self.labels = model, tuple(labels)
        self.ends = list(known.eos_ids) if end is None else []
        ids = known.encode_outputs([label + (end or "") for label in labels])
        self.targets = [torch.tensor([*own, *[_ANY_END] * (end is None)]) for own in ids]

    @torch.inference_mode()
    def alone(self, prompt: Sequence[int], batch: int = 64) -> Float64:
        """Forwards the whole prompt with each label."""
        found = np.empty(len(self.targets))
        for at, targets in self._batches(batch):
            ids = torch.tensor(prompt).expand(len(at), -1)
            ids = torch.cat((ids, targets[:, :-1].clamp(min=0)), 1)
            logits = self.model(ids, use_cache=False, logits_to_keep=targets.shape[1]).logits
            found[at] = self._sums(logits, targets)
        return _shares(found)

    @torch.inference_mode()
    def cached(self, prompt: Sequence[int], batch: int = 64) -> Float64:
        """Forwards the prompt once; all labels use its keys and values.

        Models that attend to a window are not supported.
        """
        begun = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        found = np.empty(len(self.targets))
        for at, targets in self._batches(batch):
            cache, n = DynamicCache(), len(at)
            for i, layer in enumerate(begun.past_key_values.layers):
                own = (part.expand(n, -1, -1, -1) for part in (layer.keys, layer.values))
                cache.update(*own, i)
            rest = self.model(targets[:, :-1].clamp(min=0), past_key_values=cache).logits
            found[at] = self._sums(begun.logits.expand(n, -1, -1), targets[:, :1])
            found[at] += self._sums(rest, targets[:, 1:])
        return _shares(found)

    def forwarded_tokens(self, batch: int) -> int:
        """The number of tokens behind the prompt that `cached` forwards, padding included."""
        return sum(targets[:, 1:].numel() for _, targets in self._batches(batch))

    def _batches(self, size: int) -> Iterator[tuple[list[int], Tensor]]:
        """The labels in batches of about equal lengths, and the padded targets of each batch."""
        order = sorted(range(len(self.targets)), key=lambda i: len(self.targets[i]))
        for begin in range(0, len(order), size):
            at = order[begin : begin + size]
            own = [self.targets[i] for i in at]
            yield at, pad_sequence(own, batch_first=True, padding_value=_PADDING)

    def _sums(self, logits: Tensor, targets: Tensor) -> Float64:
        """The log-probability of each row's targets, which logits at the same places give."""
        picked = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        if self.ends:
            ended = logits[..., self.ends].logsumexp(-1)
            picked = torch.where(targets == _ANY_END, ended, picked)
        logprobs = torch.where(targets == _PADDING, 0, picked - logits.logsumexp(-1))
        found: Float64 = logprobs.double().sum(1).numpy()
        return found


def _shares(logprobs: Float64) -> Float64:
    found: Float64 = np.exp(logprobs - np.logaddexp.reduce(logprobs))
    return found


def load_plain(folder: Path, dtype: torch.dtype, adapter: Path | None = None) -> Any:
    """A model of transformers, with an adapter merged by PEFT.

    The norms of a float64 model are computed in float64; transformers computes them in float32.
    """
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_norm, module)
    return model.eval()


def _norm(norm: Any, x: Tensor) -> Tensor:
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    found: Tensor = norm.weight * x * root
    return found
