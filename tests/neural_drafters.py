"""Neural proposers over tiny models: drafters of every kind, vocabularies of every policy.

If their weights are random, so are their drafts. The tests define the expected results.
"""

from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tasc_engine.drafting.neural.drafters import Eagle, Independent
from tasc_engine.drafting.neural.hybrid import TwoArmedBandit
from tasc_engine.drafting.neural.proposer import NeuralProposer
from tasc_engine.drafting.neural.recent import RecentVocabulary
from tasc_engine.drafting.neural.tree import NeuralSettings
from tasc_engine.drafting.neural.vocabulary import FullVocabulary, RankedVocabulary, Vocabulary
from tasc_engine.layout import Int32
from tasc_engine.model.decoder import LeanDecoder, lean
from tasc_engine.model.linears import Linear

KINDS = ("same", "noisy", "other", "eagle")
POLICIES = ("full", "ranked", "recent", "recent over ranked", "context only", "extension only")
INDEXED = "recent indexed"  # reads weights by index and keeps no copy
NOISE = 0.02
WINDOW = 96


class Always(TwoArmedBandit):
    """Chooses the costly option at every step."""

    def begin(self) -> bool:
        return True


@cache
def _read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def model_of(folder: Path) -> Any:
    """Loads the model in a folder in float64; the caller may change it."""
    return deepcopy(_read(folder))


def exact(model: Any) -> Any:
    """Makes the norms of a model compute in its dtype; those of transformers compute in float32."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm, module.weight, module.variance_epsilon)
    return model


def _norm(weight: Tensor, eps: float, hidden: Tensor) -> Tensor:
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def decoder_of(model: Any, capacity: int) -> LeanDecoder:
    found = lean(model, capacity)
    assert found is not None
    return found


def drafter_of(
    kind: str, folder: Path, rows: int, capacity: int, seed: int = 1
) -> tuple[Eagle | Independent, Tensor]:
    """Returns a drafter for the target in a folder, and the weight of its head.

    Args:
        kind: ``same``: the target itself; ``noisy``: a copy with noise; ``other``: a random model
            of one layer; ``eagle``: a random layer that reads the target's hidden states.
    """
    model = model_of(folder)
    torch.manual_seed(seed)
    if kind in ("same", "noisy"):
        for weight in model.parameters() if kind == "noisy" else ():
            weight.data += torch.randn_like(weight) * NOISE
        head = model.lm_head.weight.detach().clone()
        return Independent(decoder_of(model, capacity), rows, capacity), head
    small, joint = eagle_parts(folder, seed)
    head, decoder = small.lm_head.weight.detach().clone(), decoder_of(small, capacity)
    if kind == "other":
        return Independent(decoder, rows, capacity), head
    head, ends = model.lm_head.weight.detach().clone(), decoder_of(model, capacity)
    decoder.embedding, decoder.head = ends.embedding, ends.head
    return Eagle(decoder, joint, rows, capacity), head


def eagle_parts(folder: Path, seed: int = 1) -> tuple[Any, Tensor]:
    """Returns a random model of one layer, and the matrix that joins embeddings and states."""
    config = model_of(folder).config
    config.num_hidden_layers, size = 1, config.hidden_size
    torch.manual_seed(seed)
    small = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for weight in small.parameters():
        weight.data *= 4.0 if weight.dim() > 1 else 1.0
    return small, torch.cat((0.1 * torch.randn(size, size), torch.eye(size)), 1).double()


def vocabulary_of(policy: str, head: Tensor, rows: int, ranked: Int32) -> Vocabulary:
    """Makes a vocabulary of one of `POLICIES`, or `INDEXED`.

    The policy ``ranked`` uses half of the ranked tokens, and ``recent over ranked`` a quarter.
    """
    half = ranked[: len(head) // 2]
    if policy == "full":
        return FullVocabulary(Linear(head))
    if policy == "ranked":
        return RankedVocabulary(head, half)
    differs = {
        "recent": {},
        "recent over ranked": {"base": half[: len(half) // 2]},
        "context only": {"extension": False},
        "extension only": {"context": False},
        INDEXED: {"gathered": False},
    }
    made: dict[str, Any] = differs[policy]
    return RecentVocabulary(head, rows, WINDOW, **made)


def ranked_by(texts: list[list[int]], size: int) -> Int32:
    """Returns all ids of a vocabulary, sorted by decreasing frequency in texts."""
    counts = np.bincount([token for text in texts for token in text], minlength=size)
    return np.argsort(-counts, kind="stable").astype(np.int32)


def proposer_of(
    drafter: Eagle | Independent, vocabulary: Vocabulary, settings: NeuralSettings, **sizes: Any
) -> NeuralProposer:
    sizes = {"vocab_size": len(drafter.backbone.decoder.embedding), "chunk": 256, **sizes}
    return NeuralProposer(drafter, vocabulary, settings, **sizes)
