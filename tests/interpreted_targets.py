"""Makes targets on a CPU launch the kernels of a GPU, in Triton's interpreter."""

from typing import Any

import pytest
from torch import Tensor

from tasc_engine.kernels.gpu.attention import FusedRows
from tasc_engine.kv import cache
from tasc_engine.lora import adapters
from tasc_engine.lora.low_rank import GroupedTokens
from tasc_engine.model import decoder
from tasc_engine.model.cuda_graphs import GraphedForward, Work
from tasc_engine.model.decoder import LeanDecoder
from tasc_engine.model.operations import FusedOperations
from tasc_engine.model.target import Target, graphs_of


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

    def graphed(self: Target, lean: LeanDecoder) -> GraphedForward:
        return graphs_of(lean, self.config, self.cache, Anew())

    if padded:
        monkeypatch.setattr(Target, "_graphed", graphed)
    monkeypatch.setattr(decoder, "_operations", operations)
    monkeypatch.setattr(cache, "_rows_of", FusedRows)
    monkeypatch.setattr(adapters, "_tokens_of", tokens)
