"""An inverted index of a task's prompts, and the search for the most similar prompts.

A prompt's features are its distinct tokens and pairs of adjacent tokens, hashed to 32 bits. The
similarity of two prompts is the cosine of their weighted features. A feature weighs idf *
sqrt(purity). The idf is log(rows / rows with the feature) (Sparck Jones 1972). The purity is the
degree to which the outputs of the rows with the feature agree, so that words which distinguish
outputs count more than words which are merely rare. The purity is estimated from a few pairs of
rows.

Searches are compiled. They write to the caller's scratch memory and reset the entries afterwards.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import IndexPart, compiled, flat, within
from tasc_draft.drafts import DraftError, Int32, Int64, Tokens, is_first

UInt32 = NDArray[np.uint32]
Float32 = NDArray[np.float32]

PROMPT_TOKENS = 1024  # only this many last tokens of a prompt count; the input comes last
WIDEST_SHARE = 0.3  # features of a larger share of rows distinguish little and get no postings
MIN_WEIGHT, MAX_WEIGHT = 0.1, 100.0  # limits for a feature with postings; builds give 0.12 to 22

_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_KEY_BITS = np.uint64(33)
_ONE = np.uint64(1)


# The arrays of an `InputIndex` for compiled code.
InputView: Any = namedtuple("InputView", "slots keys first postings weights norms documents")


@dataclass(frozen=True)
class InputIndex(IndexPart):
    """Immutable inverted index of a task's prompts.

    Attributes:
        rows: Number of rows of the corpus, with one prompt each.
        slots: ``int32[2^m]``; entry i is the first key whose m highest bits are at least i.
        keys: ``uint32[features]``, ascending; even keys are tokens, odd keys are pairs of tokens.
        first: ``int32[features + 1]``; feature f's rows are ``postings[first[f]:first[f + 1]]``.
            A feature of too many rows has no postings.
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

    @classmethod
    def empty(cls) -> "InputIndex":
        """The index of no prompts."""
        none, zero, floats = np.zeros(0, np.int32), np.zeros(1, np.int32), np.zeros(0, np.float32)
        return cls(0, zero, none.astype(np.uint32), zero.copy(), none, floats, floats, none)

    @property
    def view(self) -> Any:
        return InputView(**self.arrays)

    def check_integrity(self) -> None:
        """Raise DraftError unless a search, which checks no bounds, stays within its memory."""
        first, keys, weights = self.first, self.keys, self.weights
        # Later checks rely on earlier checks.
        if not (
            flat(np.int32, self.slots, first, self.postings, self.documents)
            and flat(np.uint32, keys)
            and flat(np.float32, weights, self.norms)
            and len(first) == len(keys) + 1 == len(weights) + 1
            and len(self.norms) == len(self.documents) == self.rows
            and len(self.slots) > 0
            and np.array_equal(self.slots, directory(keys, len(self.slots)))
            and (keys[1:] > keys[:-1]).all()
            and first[0] == 0
            and first[-1] == len(self.postings)
            and (first[1:] >= first[:-1]).all()
            and within(self.postings, self.rows)
            # A search lists a row whenever the row's score is 0, so with a weight of 0 it would
            # list the row again and again.
            and (weights >= np.where(first[1:] > first[:-1], MIN_WEIGHT, 0)).all()
            and (weights <= MAX_WEIGHT).all()
            and (self.norms[self.postings] >= MIN_WEIGHT).all()
        ):
            raise DraftError("the input index is damaged; build the index again")


def norms_of(rows: int, first: Int32, postings: Int32, squares: Float32) -> Float32:
    """``float32[rows]`` norms from ``float32[features]`` squared weights."""
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
    """The feature of two adjacent tokens: an odd uint32."""
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


# Maximum number of postings that a search reads, starting with the rarest features. This limits the
# time of a search. On all measured tasks, reading more postings found no better rows.
MAX_POSTINGS = 100_000
# Features that no row has make a prompt less similar to all rows. Each such feature adds this share
# of the largest squared idf to the prompt's squared norm.
UNKNOWN_SHARE = 0.3

_BELOW = np.float32(0.999)  # allows for rounding
_SET_SIZE = 4 * PROMPT_TOKENS  # a power of two, at least twice the features of a prompt


class NearestScratch(NamedTuple):
    """Memory of a search; before and after a search, all ``scores`` and ``seen`` are 0."""

    scores: Float32
    touched: Int32
    seen: UInt32
    places: Int32
    features: Int64


def nearest_scratch(inputs: InputIndex) -> NearestScratch:
    """Allocates scratch memory for one search at a time in one index."""
    return NearestScratch(
        scores=np.zeros(inputs.rows, np.float32),
        touched=np.zeros(inputs.rows + 1, np.int32),
        seen=np.zeros(_SET_SIZE, np.uint32),
        places=np.zeros(2 * PROMPT_TOKENS, np.int32),
        features=np.zeros(2 * PROMPT_TOKENS, np.int64),
    )


@compiled
def nearest(inputs: Any, prompt: Any, scratch: Any, found: Any, similarity: Any) -> int:
    """Find the rows most similar to a prompt, by falling cosine, then by number.

    Args:
        inputs: An `InputView`.
        prompt: ``int32[*]``; only its last ``PROMPT_TOKENS`` tokens count.
        scratch: `NearestScratch` for the same index.
        found: ``int32[k]``, filled with row numbers.
        similarity: ``float32[k]``, filled with the rows' cosines, in (0, 1] up to rounding.

    Returns:
        The number of rows found. Rows that share no feature with the prompt are not found.
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
    """Fill ``features`` with the prompt's features that have postings.

    Returns:
        The number of these features, and the prompt's squared norm.
    """
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
        # If the rarest feature alone exceeds the limit, it is cut, and no other feature is used.
        for j in range(first[f], min(first[f + 1], first[f] + MAX_POSTINGS)):
            row = postings[j]
            touched[n] = row
            n += scores[row] == 0
            scores[row] += square
    return n


@compiled
def _rarest(first: Any, features: Any, known: int) -> int:
    """Sort features by number of postings; returns how many fit in MAX_POSTINGS, at least 1."""
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
def _best(norms: Any, scratch: Any, touched: int, norm: Any, found: Any, similarity: Any) -> int:
    """Insert the best rows into ``found`` in order and reset the scores; returns their number."""
    n, k, least = 0, len(found), np.float32(0)
    for i in range(touched):
        row = scratch.touched[i]
        score = scratch.scores[row]
        scratch.scores[row] = 0
        if score < least * norms[row]:
            continue  # the cosine is certainly too low; this needs no division
        cosine = score / (norms[row] * norm)
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
        if n == k:
            least = similarity[k - 1] * norm * _BELOW
    return n


AGREEMENT_TOKENS = 24  # outputs are compared by this many first tokens, including the end
FEATURE_PAIRS = 16  # maximum number of pairs of rows from which a feature's purity is estimated
CORPUS_PAIRS = 4096  # number of pairs of rows from which the mean agreement is estimated
MIN_PURITY = 0.01  # a feature whose drawn pairs share no beginning may still be of use

LARGEST_INDEX = np.iinfo(np.int32).max  # maximum number of postings
_SPLITMIX = np.uint64(0xBF58476D1CE4E5B9)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def build_inputs(prompts: Tokens, outputs: Tokens, documents: Int32) -> InputIndex:
    """Index the prompts of a corpus. The same rows in the same order give the same bytes.

    Memory peaks at about 40 bytes per prompt token.

    Args:
        prompts: One prompt per row; only the last ``PROMPT_TOKENS`` tokens of a prompt count.
        outputs: One output per row, without end-of-sequence.
        documents: ``int32[rows]`` number of each row's output in the corpus index.

    Raises:
        DraftError: There are too many features.
    """
    rows = len(prompts)
    keys, first, postings = _invert(prompts)
    weights = _weights(keys, first, postings, outputs)
    return InputIndex(
        rows=rows,
        slots=directory(keys, 1 << max(len(keys) // 2, 1).bit_length()),
        keys=keys,
        first=first,
        postings=postings,
        weights=weights,
        norms=norms_of(rows, first, postings, weights * weights),
        documents=np.array(documents, np.int32),
    )


def _invert(prompts: Tokens) -> tuple[UInt32, Int32, Int32]:
    """The keys of the indexed features, ascending; where their postings begin; the postings."""
    marks = _marks(prompts)
    keys = (marks >> _HALF).astype(np.uint32)
    begins = np.flatnonzero(is_first(keys))
    keys, sizes = keys[begins], np.diff(np.append(begins, len(keys)))
    wide = sizes > WIDEST_SHARE * len(prompts)
    lone = (sizes == 1) & (keys & 1 == 1) & ~wide
    posted = np.repeat(~(wide | lone), sizes)
    postings = (marks[posted] & _LOW).astype(np.int32)
    if len(postings) > LARGEST_INDEX:
        raise DraftError(
            f"the prompts have {len(postings)} features, but an index holds at most "
            f"{LARGEST_INDEX}; "
            "shorten the prompts or index fewer rows"
        )
    # Features of too many rows are kept without postings, so that they do not count as unknown.
    kept = np.where(wide, 0, sizes)[~lone]
    return keys[~lone], np.concatenate([[0], np.cumsum(kept)]).astype(np.int32), postings


def _weights(keys: UInt32, first: Int32, postings: Int32, outputs: Tokens) -> Float32:
    sizes = np.diff(first)
    purities = np.empty(len(keys))
    _measure(keys, first, postings, outputs.view, purities)
    idf = np.log(len(outputs) / np.maximum(sizes, 1))
    return np.where(sizes > 0, idf * np.sqrt(purities), 0.0).astype(np.float32)


def _marks(prompts: Tokens) -> NDArray[np.uint64]:
    """``key << 32 | row`` of every feature of every row, sorted and distinct."""
    kept = np.minimum(prompts.lengths, PROMPT_TOKENS)
    marks = np.empty(int((2 * kept - (kept > 0)).sum()), np.uint64)
    _emit(prompts.view, marks)
    marks.sort()
    return marks[is_first(marks)]


@compiled
def _emit(prompts: Any, marks: Any) -> None:
    ids, offsets = prompts
    n = 0
    for row in range(len(offsets) - 1):
        end = offsets[row + 1]
        begin = max(offsets[row], end - PROMPT_TOKENS)
        for i in range(begin, end):
            marks[n] = np.uint64(token_key(ids[i])) << _HALF | np.uint64(row)
            n += 1
        for i in range(begin, end - 1):
            marks[n] = np.uint64(pair_key(ids[i], ids[i + 1])) << _HALF | np.uint64(row)
            n += 1


@compiled
def _agreement(outputs: Any, a: int, b: int) -> float:
    """Length of the common prefix of two outputs, divided by the length of the longer output.

    Both lengths include the end and are at most AGREEMENT_TOKENS.
    """
    ids, offsets = outputs
    begin_a, begin_b = offsets[a], offsets[b]
    size_a, size_b = offsets[a + 1] - begin_a, offsets[b + 1] - begin_b
    shorter, longer = min(size_a, size_b), max(size_a, size_b)
    limit = min(shorter, AGREEMENT_TOKENS)
    common = 0
    while common < limit and ids[begin_a + common] == ids[begin_b + common]:
        common += 1
    if common == size_a and common == size_b:
        common += 1
    return min(common, AGREEMENT_TOKENS) / min(longer + 1, AGREEMENT_TOKENS)


@compiled
def _pair(seed: Any, draw: int, size: int) -> tuple[Any, Any]:
    """Two different numbers below ``size``, drawn by hash (splitmix64's finaliser)."""
    mixed = (np.uint64(seed) + np.uint64(draw + 1)) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _SPLITMIX
    mixed ^= mixed >> np.uint64(31)
    a = np.int64((mixed >> _HALF) * np.uint64(size) >> _HALF)
    b = np.int64((mixed & _LOW) * np.uint64(size - 1) >> _HALF)
    return a, (a + 1 + b) % size


@compiled
def _shared(outputs: Any) -> float:
    """The mean agreement of two rows drawn at random."""
    rows, agreed = len(outputs.offsets) - 1, 0.0
    if rows < 2:
        return MIN_PURITY
    for draw in range(CORPUS_PAIRS):
        a, b = _pair(0, draw, rows)
        agreed += _agreement(outputs, a, b)
    return agreed / CORPUS_PAIRS


@compiled
def _measure(keys: Any, first: Any, postings: Any, outputs: Any, purities: Any) -> None:
    """Fill each feature's purity; features of fewer than two rows get the mean purity."""
    shared = _shared(outputs)
    total, measured = 0.0, 0
    for f in range(len(keys)):
        begin, size = first[f], first[f + 1] - first[f]
        if size < 2:
            continue
        pairs = min(size * (size - 1) // 2, FEATURE_PAIRS)
        agreed = shared
        for draw in range(pairs):
            a, b = _pair(np.uint64(keys[f]) << _HALF, draw, size)
            agreed += _agreement(outputs, postings[begin + a], postings[begin + b])
        purities[f] = max(agreed / (pairs + 1), MIN_PURITY)
        total += purities[f]
        measured += 1
    mean = total / measured if measured else max(shared, MIN_PURITY)
    for f in range(len(keys)):
        if first[f + 1] - first[f] < 2:
            purities[f] = mean
