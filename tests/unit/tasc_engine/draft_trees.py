"""Drafts by their shape, for tests of what is done with them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts


def forest(trees: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]] | None = None) -> Drafts:
    """Trees by their parents; tokens count from 1 where they do not matter."""
    tokens = tokens or [range(1, len(tree) + 1) for tree in trees]
    depths = []
    for tree in trees:
        own: list[int] = []
        for parent in tree:
            own.append(1 + (own[parent] if parent >= 0 else 0))
        depths += own
    n = len(depths)
    return Drafts(
        np.array([t for row in tokens for t in row], np.int32),
        np.array([p for tree in trees for p in tree], np.int32),
        np.array(depths, np.int16),
        np.cumsum([0, *(len(tree) for tree in trees)]).astype(np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.int8),
    )


def no_moves() -> NDArray[np.int64]:
    return np.zeros((2, 0), np.int64)
