"""Steps of rows that use LoRA adapters, and the logits of models with merged adapters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tree_layouts import forest

from tasc_engine.layout import ForwardBatch

SPACE = 48  # cache places of a row
# For each row: the number of its adapter, its tokens in the first and in the second step, and the
# parents of its draft in the second step.
Part = tuple[int, int, int, Sequence[int]]
ROWS: Sequence[Part] = (
    (1, 7, 2, (-1, -1, 0, 2)), (0, 5, 1, (-1, 0)), (2, 3, 4, ()), (1, 1, 1, (-1,)),
    (2, 9, 3, (-1, 0, 0)), (1, 4, 1, (-1, 0, 1)), (1, 6, 2, ()),
)  # fmt: skip


def ids_of(rows: Sequence[Part]) -> list[list[int]]:
    """Returns each row's tokens without its draft; tokens count from 1."""
    return [[(5 + 13 * i + 7 * k) % 290 + 1 for k in range(a + b)] for i, (_, a, b, _) in
            enumerate(rows)]  # fmt: skip


def batches(rows: Sequence[Part]) -> tuple[ForwardBatch, ForwardBatch]:
    """Returns the first step, in which no row emits, and the second, in which all rows do."""
    n, ids = len(rows), ids_of(rows)
    firsts = np.arange(n, dtype=np.int64) * SPACE
    numbers = np.array([number for number, *_ in rows], np.int32)
    cuts = [a for _, a, _, _ in rows]

    def batch(
        starts: Sequence[int], tokens: Sequence[list[int]], draft_of: Any, trees: Any
    ) -> ForwardBatch:
        offsets = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
        flat = np.array([t for own in tokens for t in own], np.int32)
        return ForwardBatch(
            firsts, np.array(starts, np.int32), flat, offsets, np.array(draft_of, np.int32),
            forest(trees), numbers,
        )  # fmt: skip

    early = [own[:cut] for own, cut in zip(ids, cuts, strict=True)]
    late = [own[cut:] for own, cut in zip(ids, cuts, strict=True)]
    trees = [tree for *_, tree in rows]
    return batch([0] * n, early, [-1] * n, []), batch(cuts, late, range(n), trees)


def logits_of(target: Any, rows: Sequence[Part]) -> Tensor:
    """Returns the logits of all tokens of the second step that need them."""
    first, second = batches(rows)
    target.logits(first)
    return target.logits(second).clone()


def of_rows(logits: Tensor, rows: Sequence[Part], chosen: Sequence[int]) -> Tensor:
    """Returns the part of a step's logits that belongs to some rows."""
    return torch.cat([logits.split([1 + len(tree) for *_, tree in rows])[i] for i in chosen])


def merged_logits(merged: Sequence[Any], rows: Sequence[Part]) -> Tensor:
    """Returns the same with a target per row: the base, or a model with its adapter merged."""
    plain = [(0, *part) for _, *part in rows]
    found = [logits_of(target, plain) for target in merged]
    return torch.cat([of_rows(found[row[0]], rows, [i]) for i, row in enumerate(rows)])


def relative(found: Tensor, expected: Tensor) -> float:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return float((found - expected).double().norm() / expected.double().norm().clamp(min=1e-9))
