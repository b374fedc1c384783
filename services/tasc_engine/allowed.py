"""Which tokens may be chosen at the places of one step. It knows neither guides nor logits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Allowed:
    """Masks of allowed tokens, and which of them counts where.

    Attributes:
        masks: ``uint32[K, ceil(V / 32)]``; bit b of word w is token ``32 * w + b``.
        mask_of: ``int32[M]`` the mask of each place; -1 where every token is allowed.
    """

    masks: NDArray[np.uint32]
    mask_of: NDArray[np.int32]
