"""Finds the rows whose prompts are most like a prompt. It does not know what their outputs say.

The likeness is the cosine of weighted features. All work is in compiled code on the caller's
scratch, which is left clean in time proportional to what was touched.
"""

from typing import Any, NamedTuple

import numpy as np

from tasc_draft.compiled import compiled
from tasc_draft.index.inputs import (
    PROMPT_TOKENS,
    Float32,
    InputIndex,
    UInt32,
    find,
    pair_key,
    token_key,
)
from tasc_draft.tokens import Int32, Int64

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
