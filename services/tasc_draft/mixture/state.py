"""Everything compiled code works on, in one box: a call passes one reference, not fifty arrays."""

from typing import Any, NamedTuple

import numpy as np
from numba.core import types
from numba.experimental import structref
from numpy.typing import NDArray

from tasc_draft.index.aligned_keys import KINDS
from tasc_draft.index.lookup import WIDEST
from tasc_draft.mixture.candidates import WIDTH
from tasc_draft.sources import SOURCES
from tasc_draft.tokens import Int32

MIXED, TASC, TRIE = 0, 1, 2

# Scalars of the compiled code; see `DraftSettings`. sep, depth, head: of the index; asked: whether
# a source is, by its number.
GROWTH = np.dtype(
    [
        ("rule", np.int32), ("n_max", np.int32), ("p_min", np.int32),
        ("corpus_weight", np.float64), ("prefix", np.int32), ("most", np.int32),
        ("branching", np.bool_),
        ("min_prob", np.float32), ("rate", np.float32), ("vocab_size", np.int32),
        ("sep", np.int32), ("depth", np.int32), ("head", np.int32), ("recent_end", np.int32),
        ("asked", np.int8, (len(SOURCES),)),
    ],
    align=True,
)  # fmt: skip

# Room for one node's look-ups.
SCRATCH = np.dtype(
    [
        ("tokens", np.int32, (WIDEST,)), ("counts", np.int32, (WIDEST,)),
        ("sums", np.float32, (2, WIDTH)), ("keys", np.uint32, (KINDS,)),
    ],
    align=True,
)  # fmt: skip


class Words(NamedTuple):
    """``[rows, words]`` of the prompts: hash and last token of each word."""

    hashes: NDArray[np.uint32]
    lasts: Int32


class Learnt(NamedTuple):
    """``float32[CELLS]`` weights and the summed squares of their gradients (AdaGrad)."""

    weights: NDArray[np.float32]
    squares: NDArray[np.float32]


class Out(NamedTuple):
    """`Drafts`, as compiled code writes it."""

    tokens: Int32
    parents: Int32
    depths: NDArray[np.int16]
    offsets: Int32
    logp: NDArray[np.float32]
    source: NDArray[np.int8]


FIELDS = (
    "rows",  # ROW[rows]
    "nodes",  # NODE[most of a step, roots included]
    "heap",  # ENTRY[...], see `heap`
    "growth",  # GROWTH[1]
    "scratch",  # SCRATCH[1]
    "texts",  # int32[rows, capacity] prompt, SEP and answer of each row
    "own",  # LocalTexts: the same in canonical tokens, to find places by
    "canonical",  # int32[ids] a token's canonical one
    "near",  # LocalTexts: the neighbours' outputs of each row
    "near_weight",  # float32[rows, places] of each place in them
    "recent",  # LocalTexts of one line: answers finished lately
    "words",  # Words
    "corpus",  # CorpusView
    "starts",  # int32[ids + 1] where each first token's suffixes begin in the suffix array
    "aligned",  # AlignedView
    "word_starts",  # bool[vocab_size + 1], of no length when nothing is aligned
    "bigrams",  # BigramView
    "learnt",  # Learnt
    "out",  # Out
    "is_eos",  # bool[ids]
)


@structref.register
class _StateType(types.StructRef):  # type: ignore[name-defined]
    """Its fields' types as numba needs them: of values, not of literals."""

    def preprocess_fields(self, fields: Any) -> Any:
        return tuple((name, types.unliteral(kind)) for name, kind in fields)  # type: ignore[attr-defined]


class State(structref.StructRefProxy):
    """See FIELDS."""

    def __new__(cls, *fields: Any) -> Any:
        return structref.StructRefProxy.__new__(cls, *fields)


structref.define_proxy(State, _StateType, list(FIELDS))
