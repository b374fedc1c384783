"""What the rows' rules need at their next place, by row, as arrays that compiled code reads.

It knows how it is laid out, not how tokens are chosen by it.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_engine.layout import MOST_NODES
from tasc_engine.sampling import MOST_BIASES

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

SETTINGS = (
    "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
AHEAD = MOST_NODES + 1  # places of a row that one step may look at
IN_PROMPT = 1 << 30  # of ``held``


class Rules(NamedTuple):
    """By row; settings are those of `Sampling`, ``[rows]``.

    Attributes:
        plain: ``bool[rows]`` whether the greatest of the target's own logits is taken.
        penalises: ``bool[rows]``.
        answered: ``int64[rows]`` tokens of the answer so far.
        numbers: ``float64[rows, 2 * AHEAD]`` random numbers of the positions from ``first`` on.
        first: ``int64[rows]``.
        bias_ids: ``int32[rows, MOST_BIASES]`` distinct tokens, the first ``biases`` of a row.
        bias_values: ``float64[rows, MOST_BIASES]``.
        biases: ``int32[rows]``.
        held: ``int32[rows, V]`` how often a token is in the answer, and ``IN_PROMPT``.
        seen: ``int32[rows, *]`` the tokens held, the first ``distinct`` of a row.
        distinct: ``int32[rows]``.
    """

    plain: NDArray[np.bool_]
    temperature: Float64
    top_p: Float64
    top_k: Int64
    min_p: Float64
    penalises: NDArray[np.bool_]
    repetition_penalty: Float64
    presence_penalty: Float64
    frequency_penalty: Float64
    answered: Int64
    numbers: Float64
    first: Int64
    bias_ids: Int32
    bias_values: Float64
    biases: Int32
    held: Int32
    seen: Int32
    distinct: Int32


def rules_of(rows: int, capacity: int, vocab_size: int) -> Rules:
    """Rows that all decode plainly.

    What is large is zeros, which take no memory before something is written.
    """
    shapes: dict[str, tuple[Any, ...]] = {
        "numbers": (rows, 2 * AHEAD),
        "bias_ids": (rows, MOST_BIASES),
        "bias_values": (rows, MOST_BIASES),
        "held": (rows, vocab_size),
        "seen": (rows, min(capacity + AHEAD, vocab_size)),
    }
    integers = dict.fromkeys(("bias_ids", "biases", "held", "seen", "distinct"), np.int32)
    types: dict[str, Any] = {
        **integers,
        **dict.fromkeys(("plain", "penalises"), np.bool_),
        **dict.fromkeys(("top_k", "answered", "first"), np.int64),
    }
    made = {
        name: np.zeros(shapes.get(name, (rows,)), types.get(name, np.float64))
        for name in Rules._fields
    }
    made["plain"][:] = True
    return Rules(**made)
