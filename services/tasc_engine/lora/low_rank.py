"""What low-rank adapters add to linear layers, each to the tokens of its own rows: by torch.

LoRA (Hu et al. 2021, arXiv 2106.09685): an adapter adds ``x @ down.T @ up.T`` to a layer's output.
All adapters' weights of a layer stand beside each other and a mask leaves each token its own, so
that their number changes no count of calls. It knows weights and numbers of adapters, no models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class LowRank:
    """An adapter's weights of one linear layer.

    Attributes:
        down: ``[r, in]``.
        up: ``[out, r]``.
        scale: Of what is added.
    """

    down: Tensor
    up: Tensor
    scale: float

    def cast(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """``[r, in]`` and ``[out, r]``, the scale in the second, of a tensor's dtype and device."""
        up = self.up.double() * self.scale
        return self.down.to(like.device, like.dtype), up.to(like.device, like.dtype)


# Of each adapter, for each of the layers that are joined into one; None where it adds nothing.
Weights = Sequence[Sequence[LowRank | None]]
# Adds to ``[..., out]``, in place, what the token's adapter makes of ``[..., in]``.
Addition = Callable[[Tensor, Tensor], None]


class AdapterTokens(Protocol):
    """Which adapter each token of a forward uses.

    Attributes:
        count: AdapterTokens of the forward.
    """

    count: int

    def begin(self, numbers: Tensor) -> None:
        """Take in a forward: ``int64[N]`` the number of each token's adapter, 0 for none."""
        ...

    def addition(self, weights: Weights, widths: Sequence[int], like: Tensor) -> Addition:
        """What adapters add to a layer, or to layers whose outputs lie one behind the other.

        Args:
            widths: Outputs of each layer.
            like: Of the dtype and device to work in.
        """
        ...


class MaskedTokens:
    """See `AdapterTokens`; on any device, three calls a layer.

    Nothing waits for the device or depends on values, so that it can be captured in a CUDA graph;
    for the same reason it skips nothing where no token has an adapter.
    """

    def __init__(self) -> None:
        self.count = 0
        self._tables: dict[tuple[int, ...], Tensor] = {}
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def begin(self, numbers: Tensor) -> None:
        """See `AdapterTokens`."""
        self.count, self._numbers = len(numbers), numbers
        self._masks.clear()

    def addition(self, weights: Weights, widths: Sequence[int], like: Tensor) -> Addition:
        """See `AdapterTokens`."""
        down, up, ranks = _stacked(weights, widths, like)
        if ranks not in self._tables:
            self._tables[ranks] = _table(ranks, like)

        def add(x: Tensor, y: Tensor) -> None:
            inner = functional.linear(x.reshape(-1, x.shape[-1]), down).mul_(self._mask(ranks))
            y.view(-1, y.shape[-1]).addmm_(inner, up)

        return add

    def _mask(self, ranks: tuple[int, ...]) -> Tensor:
        """``[N, sum of ranks]`` 1 in the columns of the token's own adapter; made once a step."""
        if ranks not in self._masks:
            self._masks[ranks] = self._tables[ranks].index_select(0, self._numbers)
        return self._masks[ranks]


def _stacked(
    weights: Weights, widths: Sequence[int], like: Tensor
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """``[R, in]``, ``[R, out]`` in blocks, and how many of the R each adapter has."""
    downs, ups, ranks = [], [], []
    for own in weights:
        ranks.append(sum(len(w.down) for w in own if w))
        for part, w in enumerate(own):
            if w:
                down, up = w.cast(like)
                downs.append(down)
                block = [like.new_zeros(len(down), width) for width in widths]
                block[part] = up.T
                ups.append(torch.cat(block, 1))
    return torch.cat(downs), torch.cat(ups), tuple(ranks)


def _table(ranks: tuple[int, ...], like: Tensor) -> Tensor:
    """``[adapters + 1, sum of ranks]`` the mask of each number."""
    owner = torch.arange(1, len(ranks) + 1).repeat_interleave(torch.tensor(ranks))
    numbers = torch.arange(len(ranks) + 1)
    return (numbers[:, None] == owner).to(like.device, like.dtype)
