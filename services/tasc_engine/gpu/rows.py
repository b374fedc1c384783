"""Attention on a GPU: one fused kernel for all rows of a step. It knows places, no tokens."""

from torch import Tensor

from tasc_engine.gpu.attention import attend
from tasc_engine.layout import Int64, StepLayout


class FusedRows:
    """Attends for all rows of a step; see `RowByRow`.

    Args:
        longest: Places of the longest row there can be.
    """

    def __init__(self, pool: Tensor, longest: int) -> None:
        self._pool = pool
        self._longest = longest

    def begin(self, host: StepLayout[Int64], device: StepLayout[Tensor]) -> None:
        """Take in a step's layout."""
        self._step = device

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """See `RowCache.attend`."""
        return attend(query, self._pool[layer], self._step, scale, self._longest, window, softcap)
