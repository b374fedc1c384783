"""The learnt weights of a task's evidence, and those to begin with. It learns nothing itself."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasc_draft.errors import DraftError
from tasc_draft.index import cells

# Middle of each level's share; level 0, no evidence for a candidate, counts like the least.
_SHARES = (0.003, 0.005, 0.03, 0.1, 0.22, 0.4, 0.62, 0.82, 0.93, 0.985)
_SHIPPED = Path(__file__).with_name("default_weights.npz")


@dataclass(frozen=True)
class Weights:
    """What each cell of evidence is worth.

    Attributes:
        values: ``float32[CELLS]``.
    """

    values: NDArray[np.float32]

    def __post_init__(self) -> None:
        # Compiled code looks weights up unchecked.
        if self.values.shape != (cells.CELLS,):
            raise DraftError(
                f"weights of shape {self.values.shape} do not fit {cells.CELLS} cells of evidence; "
                "build the index again with this version"
            )

    @classmethod
    def prior(cls) -> "Weights":
        """Every source believed in moderately: a third of the log of its share."""
        values = np.full(cells.CELLS, -3.0, np.float32)
        levels = [0.35 * math.log(share) for share in _SHARES]
        values[: cells.OTHER_BASE] = np.tile(levels, cells.OTHER_BASE // cells.LEVELS)
        return cls(values)

    @classmethod
    def initial(cls) -> "Weights":
        """The weights that this version ships with, averaged over tasks of many kinds."""
        return _shipped()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def check_integrity(self) -> None:
        """Raise DraftError unless every cell has a finite weight."""
        if not np.isfinite(self.values).all():
            raise DraftError("some weights are not finite; build the index again")


@functools.cache
def _shipped() -> Weights:
    with np.load(_SHIPPED) as file:
        return Weights(file["values"].astype(np.float32))
