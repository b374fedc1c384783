"""Makes targets on a CPU launch the kernels of a GPU, in Triton's interpreter."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tasc_engine.kernels.gpu.attention import FusedRows
from tasc_engine.kv import cache
from tasc_engine.lora import adapters
from tasc_engine.lora.low_rank import GroupedTokens
from tasc_engine.model import decoder, target
from tasc_engine.model.cuda_graphs import Work
from tasc_engine.model.decoder import LeanDecoder
from tasc_engine.model.operations import FusedOperations
from tasc_engine.model.target import Target


class Anew:
    """A recorder of graphs that runs the recorded work again."""

    def record(self, run: Work) -> Work:
        return run

    def wait(self) -> None:
        """Nothing runs meanwhile."""


def as_on_gpu(monkeypatch: pytest.MonkeyPatch, padded: bool = False) -> None:
    """Makes targets that are loaded from now on use interpreted kernels.

    Args:
        padded: Whether steps are padded as for CUDA graphs; each step runs anew.
    """

    def operations(cos_sin: Tensor, heads: int, kv_heads: int, _: str) -> FusedOperations:
        return FusedOperations(cos_sin, heads, kv_heads)

    def tokens(_: Any, count: int) -> GroupedTokens:
        return GroupedTokens(count)

    def logits(self: Target, lean: LeanDecoder) -> Tensor:
        return target.logits_of_graphs(lean, self.config)

    if padded:
        monkeypatch.setattr(Target, "_logits_of_graphs", logits)
        monkeypatch.setattr(target, "graphs_of", partial(target.graphs_of, recorder=Anew()))
    monkeypatch.setattr(decoder, "_compiles", lambda model: False)
    monkeypatch.setattr(decoder, "_operations", operations)
    monkeypatch.setattr(cache, "_rows_of", FusedRows)
    monkeypatch.setattr(adapters, "_tokens_of", tokens)
