"""Shapes of what compiled code works on; `memory` puts it into one box."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.index.aligned_keys import KINDS
from tasc_draft.index.lookup import COLUMNS, WIDEST
from tasc_draft.mixture.candidates import WIDTH
from tasc_draft.sources import NGRAM_SOURCES
from tasc_draft.tokens import Int32

MIXED, TASC, TRIE = 0, 1, 2

# Scalars of the compiled code; see `DraftSettings`. sep, depth, head: of the index; asked: whether
# a source is, by its number.
GROWTH = np.dtype(
    [
        ("rule", np.int32), ("n_max", np.int32), ("p_min", np.int32),
        ("corpus_weight", np.float64), ("prefix", np.int32), ("most", np.int32),
        ("branching", np.bool_),
        ("min_prob", np.float32), ("hope", np.float32), ("rate", np.float32),
        ("vocab_size", np.int32),
        ("sep", np.int32), ("depth", np.int32), ("head", np.int32), ("recent_end", np.int32),
        ("asked", np.int8, (len(NGRAM_SOURCES),)),
    ],
    align=True,
)  # fmt: skip

# Room for one node's look-ups.
SCRATCH = np.dtype(
    [
        ("found", np.int32, (WIDEST, COLUMNS)),
        ("sums", np.float32, (2, WIDTH)), ("keys", np.uint32, (KINDS,)),
    ],
    align=True,
)  # fmt: skip


class Words(NamedTuple):
    """``[rows, words]`` of the prompts: hash and last token of each word."""

    hashes: NDArray[np.uint32]
    lasts: Int32


class Learnt(NamedTuple):
    """``float32[CELLS]`` weights and the summed squares of their gradients (AdaGrad).

    Attributes:
        trust, trust_squares: ``float32[guests.CELLS, 5]``, the same beside a guest.
    """

    weights: NDArray[np.float32]
    squares: NDArray[np.float32]
    trust: NDArray[np.float32]
    trust_squares: NDArray[np.float32]


class Out(NamedTuple):
    """`Drafts`, as compiled code writes it."""

    tokens: Int32
    parents: Int32
    depths: NDArray[np.int16]
    offsets: Int32
    logp: NDArray[np.float32]
    source: NDArray[np.int8]
