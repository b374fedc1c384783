"""Random low-rank weights of joined layers, and the result of each token by its definition."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tasc_engine.lora.low_rank import LowRank

Ranks = Sequence[Sequence[int]]  # of each adapter in each joined layer, 0 for none


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def weights_of(ranks: Ranks, size: int, widths: Sequence[int], dtype: torch.dtype) -> Any:
    def made(rank: int, width: int, scale: float) -> LowRank:
        down, up = numbers(rank, size, dtype=dtype), numbers(width, rank, dtype=dtype)
        return LowRank(down, up, scale)

    return [
        [made(r, w, 0.5 + i) if r else None for r, w in zip(own, widths, strict=True)]
        for i, own in enumerate(ranks)
    ]


def by_definition(
    x: Tensor, y: Tensor, weights: Any, widths: Any, own: Sequence[int], size: bool = False
) -> Tensor:
    """Returns the result in float64, one token after the other; or the sum of absolute values."""
    seen = (lambda a: a.double().abs()) if size else (lambda a: a.double())
    out = seen(y).clone()
    for t, number in enumerate(own):
        begins = [sum(widths[:part]) for part in range(len(widths))]
        for w, begin, width in zip(weights[number - 1], begins, widths, strict=True):
            if number and w is not None:
                inner = seen(w.down) @ seen(x[t])
                out[t, begin : begin + width] += w.scale * (seen(w.up) @ inner)
    return out


@st.composite
def cases(draw: Any) -> tuple[Ranks, int, list[int], list[int]]:
    """Ranks, inputs, outputs of each layer, and the number of each token's adapter."""
    widths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    rank = st.integers(0, 40)
    own = st.tuples(*(rank for _ in widths))
    ranks = draw(st.lists(own, min_size=1, max_size=4).filter(lambda r: any(map(any, r))))
    tokens = draw(st.lists(st.integers(0, len(ranks)), min_size=1, max_size=30))
    return ranks, draw(st.integers(1, 70)), widths, tokens
