"""The table of learnt weights of a task's evidence, and the cell of each piece of evidence.

A candidate token's score is the sum of one weight per *slot*; a slot is a way in which a source
supports tokens. The weight is looked up by the amount of evidence (the *base*) and by the share of
the evidence that supports the candidate (the *level*; 0: none). Bases and levels are coarse, so
that a few hundred answers suffice to learn a few thousand weights.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft import drafts
from tasc_draft.compiled import borrowing
from tasc_draft.drafts import DraftError
from tasc_draft.index.aligned import KINDS

LEVELS = 10
ORDERS = 7
AMOUNTS = 6
LENGTHS = 6
GROUPS = 4  # classes of a local text's evidence, by similarity or by number of agreeing places
CONTEXTS = 3  # maximum number of corpus contexts used at a node

# Slots, in the order of their tables: corpus by context, neighbours (longest agreement, and all),
# prompt, answer so far, recent answers, the target's bigrams, aligned words by kind.
CORPUS, NEIGHBOURS, PROMPT = 0, CONTEXTS, CONTEXTS + 2
ANSWER, RECENT, BIGRAM, ALIGNED = PROMPT + 1, PROMPT + 2, PROMPT + 3, PROMPT + 4
SLOTS = ALIGNED + KINDS

CORPUS_SIZE = ORDERS * AMOUNTS * LEVELS
LOCAL_SIZE = LENGTHS * GROUPS * LEVELS
ALIGNED_SIZE = AMOUNTS * LEVELS

# The source of each slot.
SOURCE_OF_SLOT = (
    *(drafts.CORPUS,) * CONTEXTS,
    *(drafts.NEIGHBOURS,) * 2,
    *(drafts.PROMPT,) * 2,
    drafts.RECENT,
    drafts.BIGRAMS,
    *(drafts.ALIGNED,) * KINDS,
)

LOCAL_BASE = CONTEXTS * CORPUS_SIZE
BIGRAM_BASE = LOCAL_BASE + (BIGRAM - NEIGHBOURS) * LOCAL_SIZE
ALIGNED_BASE = BIGRAM_BASE + LEVELS
OTHER_BASE = ALIGNED_BASE + KINDS * ALIGNED_SIZE
CELLS = OTHER_BASE + (ORDERS + 1) * AMOUNTS * LEVELS
MAX_WEIGHT = 1e6  # maximum absolute value of a weight; learnt weights are far below


# Lower limits of all classes but the first.
_SIMILARITY_LIMITS = (0.25, 0.45, 0.7)
_AMOUNT_LIMITS = (2, 3, 5, 9, 33)
_ORDER_LIMITS = (2, 3, 4, 5, 7, 10)
_LENGTH_LIMITS = (2, 3, 4, 5, 8)


@borrowing
def _class(value: float, limits: Any) -> int:
    n = 0
    for limit in limits:
        n += value >= limit
    return n


@borrowing
def share_level(share: float) -> int:
    """Level 1 to 9 of the share of a source's evidence that supports a candidate."""
    # A binary search, since each piece of evidence needs a level. A loop over limits is slower.
    if share >= 0.5:
        if share >= 0.9:
            return 9 if share >= 0.97 else 8
        return 7 if share >= 0.75 else 6
    if share >= 0.15:
        return 5 if share >= 0.3 else 4
    if share >= 0.05:
        return 3
    return 2 if share >= 0.01 else 1


@borrowing
def similarity_class(similarity: float) -> int:
    """0 to 3 by the cosine of the most similar training prompt."""
    return _class(similarity, _SIMILARITY_LIMITS)


@borrowing
def corpus_base(slot: int, tokens: int, count: int) -> int:
    return (slot * ORDERS * AMOUNTS + _context_class(tokens, count)) * LEVELS


@borrowing
def _context_class(tokens: int, count: int) -> int:
    return _class(tokens, _ORDER_LIMITS) * AMOUNTS + _class(count, _AMOUNT_LIMITS)


@borrowing
def near_base(slot: int, agreeing: int, group: int) -> int:
    cell = ((slot - NEIGHBOURS) * LENGTHS + _class(agreeing, _LENGTH_LIMITS)) * GROUPS + group
    return LOCAL_BASE + cell * LEVELS


@borrowing
def counted_base(slot: int, agreeing: int, places: int) -> int:
    """Base for prompt, answer and recent answers, by the number of agreeing places."""
    return near_base(slot, agreeing, min(places, GROUPS) - 1)


@borrowing
def aligned_base(kind: int, count: int) -> int:
    return ALIGNED_BASE + (kind * AMOUNTS + _class(count, _AMOUNT_LIMITS)) * LEVELS


@borrowing
def other_cell(tokens: int, count: int, share: float) -> int:
    """The cell of "none of the candidates", by the longest corpus context.

    ``tokens`` is 0 if there is no context.
    """
    if tokens == 0:
        return OTHER_BASE + ORDERS * AMOUNTS * LEVELS
    return OTHER_BASE + _context_class(tokens, count) * LEVELS + share_level(share)


@dataclass(frozen=True)
class Weights:
    """The weight of each cell of evidence.

    Attributes:
        values: ``float32[CELLS]``.
    """

    values: NDArray[np.float32]

    def __post_init__(self) -> None:
        # Compiled code does not check bounds.
        if self.values.shape != (CELLS,):
            raise DraftError(
                f"weights of shape {self.values.shape} do not fit {CELLS} cells of evidence; "
                "build the index again with this version"
            )

    @classmethod
    @functools.cache
    def initial(cls) -> "Weights":
        """The weights that this version ships with: averages over tasks of many kinds."""
        with np.load(Path(__file__).with_name("default_weights.npz")) as file:
            return cls(file["values"].astype(np.float32))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def check_integrity(self) -> None:
        """Raise DraftError unless every cell has a weight that can be added up."""
        if self.values.dtype != np.float32 or not (np.abs(self.values) <= MAX_WEIGHT).all():
            raise DraftError(
                f"some weights are not numbers within {MAX_WEIGHT:g}; build the index again"
            )
