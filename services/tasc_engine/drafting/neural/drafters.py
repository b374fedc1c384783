"""The two kinds of drafter: an EAGLE-style head that shares the target's ends, and a small model.

Each says what its layers read. They hold weights and know no rows.
"""

from typing import Any

import torch
from torch import Tensor

from tasc_engine.drafting.neural.backbone import Backbone
from tasc_engine.model.decoder import LeanDecoder
from tasc_engine.model.linears import Linear


class Independent:
    """A small causal LM of the target's tokenizer (VocabTrim's independent drafter, Goel et al.
    2025, arXiv 2506.22694)."""

    needs_hidden = False

    def __init__(self, decoder: LeanDecoder, rows: int, capacity: int) -> None:
        self.backbone = Backbone(decoder, rows, capacity)

    def inputs(self, ids: Tensor, hidden: Tensor | None) -> Tensor:
        return self.backbone.decoder.embed(ids)


class Eagle:
    """One layer over the target's last hidden states and the embeddings of the tokens behind them
    (EAGLE: Li et al. 2024, arXiv 2401.15077; drafted by the trees of EAGLE-2, arXiv 2406.16858).

    Of a prompt's beginning that is copied from the prefix cache the target computes nothing, so its
    hidden states are unknown: the head drafts from what lies behind that alone.

    Args:
        decoder: The head's layer; its embedding is the target's.
        joint: ``[D, 2 D]`` what makes one input of an embedding and a hidden state.
    """

    needs_hidden = True

    def __init__(self, decoder: LeanDecoder, joint: Tensor, rows: int, capacity: int) -> None:
        self.backbone = Backbone(decoder, rows, capacity)
        self._joint = Linear(joint)

    def inputs(self, ids: Tensor, hidden: Tensor | None) -> Tensor:
        assert hidden is not None, "the head reads hidden states"
        embedded: Any = self.backbone.decoder.embed(ids)
        return self._joint(torch.cat((embedded, hidden.to(embedded.dtype)), -1))
