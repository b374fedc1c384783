"""Compiled code reads and writes a box's arrays in place, by name."""

from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError

from tasc_draft.compiled import borrowing
from tasc_draft.mixture.box import Box
from tasc_draft.mixture.state import Learnt  # compiled code is kept by types, so only real ones

POINT = np.dtype([("x", np.int32), ("y", np.float32)], align=True)


def box() -> tuple[Box, Any]:
    arrays = np.arange(4, dtype=np.int64), np.ones((2, 3), np.float32), np.zeros(2, POINT)
    return Box(ids=arrays[0], learnt=Learnt(*(arrays[1],) * 4), points=arrays[2]), arrays


@borrowing
def write(state: Any) -> float:
    state.learnt.squares[1, 2] = 5.0
    state.points[1].x = state.ids[3] + state.ids[2]
    return state.learnt.weights.sum()


@borrowing
def read_what_is_not_there(state: Any) -> int:
    return state.nothing[0]


def test_fields_are_read_and_written_in_place() -> None:
    state, (_, right, points) = box()
    assert write(state) == 10.0
    assert right[1, 2] == 5.0
    assert points[1]["x"] == 5


def test_a_field_that_is_not_there_does_not_compile() -> None:
    with pytest.raises(TypingError, match="nothing"):
        read_what_is_not_there(box()[0])


def test_boxes_of_the_same_types_share_compiled_code() -> None:
    write(box()[0])
    compiled = len(write.signatures)
    write(box()[0])
    assert len(write.signatures) == compiled
