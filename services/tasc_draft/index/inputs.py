"""The inputs of a task's rows as an inverted index: which rows have a prompt like this one.

A prompt's features are its distinct tokens and pairs of neighbouring tokens, hashed to 32 bits. It
does not know what the ids mean, how rows are scored (`nearest`) or what the outputs say.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.tokens import Int32

UInt32 = NDArray[np.uint32]
Float32 = NDArray[np.float32]

ARRAYS = ("slots", "keys", "first", "postings", "weights", "norms", "documents")

# The tokens of a prompt that count: its last ones, where the request stands behind its template.
PROMPT_TOKENS = 1024
# A feature of more than this share of the rows tells nothing apart, and has the most postings.
WIDEST_SHARE = 0.3

_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_KEY_BITS = np.uint64(33)
_ONE = np.uint64(1)


class InputView(NamedTuple):
    """The arrays of an InputIndex, as compiled code takes them."""

    slots: Int32
    keys: UInt32
    first: Int32
    postings: Int32
    weights: Float32
    norms: Float32
    documents: Int32


@dataclass(frozen=True)
class InputIndex:
    """Immutable inverted index of a task's prompts.

    Attributes:
        rows: Rows of the corpus, one prompt each.
        slots: ``int32[2^m]``, where the keys begin whose m highest bits are at least the place's.
        keys: ``uint32[features]``, ascending; odd ones are pairs of tokens, even ones tokens.
        first: ``int32[features + 1]``; feature f's rows are ``postings[first[f]:first[f + 1]]``.
            A feature of too many rows has none.
        postings: ``int32[*]`` row numbers, ascending within a feature.
        weights: ``float32[features]``; 0 for a feature without postings.
        norms: ``float32[rows]``, root of the summed squared weights of each row's features.
        documents: ``int32[rows]`` number of each row's output in the corpus index.
    """

    rows: int
    slots: Int32
    keys: UInt32
    first: Int32
    postings: Int32
    weights: Float32
    norms: Float32
    documents: Int32

    def __post_init__(self) -> None:
        # Read-only like a mapped file, so that compiled code sees one array type for both.
        for name in ARRAYS:
            getattr(self, name).setflags(write=False)

    @property
    def view(self) -> InputView:
        return InputView(*(getattr(self, name) for name in ARRAYS))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in ARRAYS)

    def check_integrity(self) -> None:
        """Raise DraftError unless the arrays form an inverted index with consistent weights."""
        ok = self._shapes_fit() and self._features_are_sorted() and self._postings_fit()
        if not (ok and self._weights_fit()):
            raise DraftError("the input index's arrays are inconsistent; build the index again")

    def _shapes_fit(self) -> bool:
        features, size = len(self.keys), len(self.slots)
        return (
            len(self.first) == features + 1
            and len(self.weights) == features
            and len(self.norms) == len(self.documents) == self.rows
            and size > 0
            and size & (size - 1) == 0
            and bool((self.documents >= 0).all())
        )

    def _features_are_sorted(self) -> bool:
        first = self.first
        return bool(
            (self.keys[1:] > self.keys[:-1]).all()
            and np.array_equal(self.slots, directory(self.keys, len(self.slots)))
            and first[0] == 0
            and first[-1] == len(self.postings)
            and (np.diff(first) >= 0).all()
        )

    def _postings_fit(self) -> bool:
        sizes, postings = np.diff(self.first), self.postings
        feature = np.repeat(np.arange(len(sizes)), sizes)
        same = feature[1:] == feature[:-1]
        pairs = self.keys & 1 == 1
        return bool(
            ((postings >= 0) & (postings < self.rows)).all()
            and (np.diff(postings)[same] > 0).all()
            and (sizes <= WIDEST_SHARE * self.rows).all()
            and (sizes[pairs] != 1).all()
        )

    def _weights_fit(self) -> bool:
        # A square of 0 would let a search touch a row twice, past the end of its scratch.
        sizes, squares = np.diff(self.first), self.weights * self.weights
        return bool(
            np.isfinite(squares).all()
            and ((squares > 0) == (sizes > 0)).all()
            and np.allclose(self.norms, norms_of(self.rows, self.first, self.postings, squares))
        )


def norms_of(rows: int, first: Int32, postings: Int32, squares: Float32) -> Float32:
    """``float32[rows]`` from ``float32[features]`` squared weights."""
    each = np.repeat(squares, np.diff(first))
    return np.sqrt(np.bincount(postings, each, rows)).astype(np.float32)


def directory(keys: UInt32, size: int) -> Int32:
    """``int32[size]``: where in sorted ``keys`` each of ``size`` equal shares of uint32 begins."""
    begins = np.arange(size, dtype=np.uint64) * np.uint64(2**32 // size)
    return np.searchsorted(keys, begins).astype(np.int32)


@compiled
def token_key(token: int) -> Any:
    """The feature of a token: an even uint32, not 0."""
    mixed = np.uint64(token + 1) * _MIX
    return np.uint32(max(mixed >> _KEY_BITS, _ONE) << _ONE)


@compiled
def pair_key(token: int, following: int) -> Any:
    """The feature of two neighbouring tokens: an odd uint32."""
    mixed = ((np.uint64(token + 1) * _MIX) ^ (np.uint64(following + 7) * _MIX_SECOND)) * _MIX
    return np.uint32((mixed >> _KEY_BITS) << _ONE | _ONE)


@compiled
def find(slots: Any, keys: Any, key: Any) -> int:
    """The number of a feature, or -1."""
    at = slots[np.uint64(key) * np.uint64(len(slots)) >> np.uint64(32)]
    while at < len(keys) and keys[at] < key:
        at += 1
    if at < len(keys) and keys[at] == key:
        return at
    return -1
