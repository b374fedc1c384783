"""The inputs of a task's rows as an inverted index, and the search for the most similar prompts.

A prompt's features are its distinct tokens and pairs of neighbouring tokens, hashed to 32 bits. The
similarity of two prompts is the cosine of their weighted features. Searches are compiled and write
to the caller's scratch, which they leave clean in time proportional to what they touched.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.tokens import Int32, Int64

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


# Postings looked at for one prompt, at most, those of rare features first; bounds the time of a
# search. Looking at more found no better rows for any of the tasks measured.
MAX_POSTINGS = 100_000
# What no row has tells how unlike all rows a prompt is; this share of the greatest squared idf.
UNKNOWN_SHARE = 0.3

_SET_SIZE = 4 * PROMPT_TOKENS  # at least twice the features of a prompt, a power of two


class NearestScratch(NamedTuple):
    """What a search writes on; clean, that is all 0 in scores and seen, before and after it."""

    scores: Float32
    touched: Int32
    seen: UInt32
    places: Int32
    features: Int64


def nearest_scratch(inputs: InputIndex) -> NearestScratch:
    """Scratch for searches in one index, one after the other."""
    return NearestScratch(
        scores=np.zeros(inputs.rows, np.float32),
        touched=np.zeros(inputs.rows + 1, np.int32),
        seen=np.zeros(_SET_SIZE, np.uint32),
        places=np.zeros(2 * PROMPT_TOKENS, np.int32),
        features=np.zeros(2 * PROMPT_TOKENS, np.int64),
    )


@compiled
def nearest(inputs: Any, prompt: Any, scratch: Any, found: Any, similarity: Any) -> int:
    """The rows of greatest cosine with a prompt, descending; of equals the lower number first.

    Args:
        inputs: InputView.
        prompt: ``int32[*]``; its last ``PROMPT_TOKENS`` tokens count.
        scratch: NearestScratch of the same index.
        found: ``int32[k]`` to fill with row numbers.
        similarity: ``float32[k]`` to fill with their cosines, in (0, 1] up to rounding.

    Returns:
        How many were found; a row that shares no feature with the prompt never is.
    """
    known, square = _features(inputs, prompt, scratch)
    if known == 0 or len(found) == 0:
        return 0
    touched = _score(inputs, scratch, known)
    return _best(inputs.norms, scratch, touched, np.float32(np.sqrt(square)), found, similarity)


@compiled
def _is_new(seen: Any, places: Any, n: int, key: Any) -> bool:
    at = np.int64(key >> np.uint32(1)) & (len(seen) - 1)
    while seen[at] != 0 and seen[at] != key:
        at = (at + 1) & (len(seen) - 1)
    if seen[at] == key:
        return False
    seen[at] = key
    places[n] = at
    return True


@compiled
def _features(inputs: Any, prompt: Any, scratch: Any) -> tuple[int, float]:
    """Fill ``features`` with those that have postings; returns how many, and the squared norm."""
    seen, places, features = scratch.seen, scratch.places, scratch.features
    unknown = UNKNOWN_SHARE * np.log(max(len(inputs.norms), 1)) ** 2
    begin = max(len(prompt) - PROMPT_TOKENS, 0)
    n, known, square = 0, 0, 0.0
    for i in range(begin, len(prompt)):
        for kind in range(2 if i > begin else 1):
            key = token_key(prompt[i]) if kind == 0 else pair_key(prompt[i - 1], prompt[i])
            if not _is_new(seen, places, n, key):
                continue
            n += 1
            f = find(inputs.slots, inputs.keys, key)
            if f < 0:
                square += unknown
                continue
            square += inputs.weights[f] ** 2
            if inputs.first[f + 1] > inputs.first[f]:
                features[known] = f
                known += 1
    for i in range(n):
        seen[places[i]] = 0
    return known, square


@compiled
def _score(inputs: Any, scratch: Any, known: int) -> int:
    """Add up the rows' scores; returns how many rows were touched."""
    first, postings = inputs.first, inputs.postings
    scores, touched, features = scratch.scores, scratch.touched, scratch.features
    total = 0
    for i in range(known):
        f = features[i]
        total += first[f + 1] - first[f]
    if total > MAX_POSTINGS:
        known = _rarest(first, features, known)
    n = 0
    for i in range(known):
        f = features[i]
        square = inputs.weights[f] ** 2
        # Only a single feature can have more postings than the bound.
        for j in range(first[f], min(first[f + 1], first[f] + MAX_POSTINGS)):
            row = postings[j]
            touched[n] = row
            n += scores[row] == 0
            scores[row] += square
    return n


@compiled
def _rarest(first: Any, features: Any, known: int) -> int:
    """Sort features by number of postings; returns how many of them stay within the bound."""
    for i in range(known):
        f = features[i]
        features[i] = np.int64(first[f + 1] - first[f]) << 32 | f
    features[:known].sort()
    looked_at = 0
    for i in range(known):
        looked_at += features[i] >> 32
        if looked_at > MAX_POSTINGS and i > 0:
            return i
        features[i] &= 0xFFFFFFFF
    return known


@compiled
def _best(
    norms: Any, scratch: Any, touched: int, norm: Any, found: Any, similarity: Any
) -> int:  # fmt: skip
    """Keep the best rows in order by insertion; leaves the scores clean."""
    n, k = 0, len(found)
    for i in range(touched):
        row = scratch.touched[i]
        cosine = scratch.scores[row] / (norms[row] * norm)
        scratch.scores[row] = 0
        if n == k and cosine < similarity[k - 1]:
            continue
        if n == k and cosine == similarity[k - 1] and row > found[k - 1]:
            continue
        n = min(n + 1, k)
        at = n - 1
        while at > 0 and (
            similarity[at - 1] < cosine or (similarity[at - 1] == cosine and found[at - 1] > row)
        ):
            similarity[at], found[at] = similarity[at - 1], found[at - 1]
            at -= 1
        similarity[at], found[at] = cosine, row
    return n
