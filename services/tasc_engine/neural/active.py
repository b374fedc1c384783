"""How many tokens were drafted from, row by row, without a wait for the device at each step."""

from collections.abc import Callable

import torch
from torch import Tensor

from tasc_engine.layout import Int32
from tasc_engine.neural.vocabulary import Vocabulary

STEPS = 16  # whose sizes are fetched at once


class ActiveSizes:
    """Collects the sizes of a vocabulary on its device.

    Args:
        tell: Gets the sizes of so many steps' drafted rows, on the engine's thread.
    """

    def __init__(
        self, vocabulary: Vocabulary, device: torch.device, tell: Callable[[list[int]], None]
    ) -> None:
        self._vocabulary, self._device, self._tell = vocabulary, device, tell
        self._held: list[Tensor] = []

    @torch.inference_mode()
    def drafted(self, rows: Int32) -> None:
        """Take in a step's rows, behind their drafts."""
        on_device = torch.from_numpy(rows.astype("int64")).to(self._device, non_blocking=True)
        self._held.append(self._vocabulary.sizes(on_device).clone())
        if len(self._held) == STEPS:
            sizes: list[int] = torch.cat(self._held).tolist()
            self._held.clear()
            self._tell(sizes)
