"""Builds the inverted index of a task's prompts. It knows no files and does not search.

A feature weighs idf * sqrt(purity). The idf is log(rows / rows that have it) (Sparck Jones 1972).
The purity is how much the outputs of those rows agree, so that words which tell outputs apart
count for more than words which are merely rare; it is an estimate from a few pairs of rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.index.inputs import (
    PROMPT_TOKENS,
    WIDEST_SHARE,
    Float32,
    InputIndex,
    UInt32,
    directory,
    norms_of,
    pair_key,
    token_key,
)
from tasc_draft.tokens import Int32, Int64, Tokens

# Outputs agree or not by their beginnings: this many tokens, the end of the output being one.
AGREEMENT_TOKENS = 24
# Pairs of rows from which a feature's purity is estimated, at most, and the corpus-wide mean.
FEATURE_PAIRS = 16
CORPUS_PAIRS = 4096
# No shared beginning among the pairs drawn does not mean that a feature is worthless.
LEAST_PURITY = 0.01

_LARGEST = np.iinfo(np.int32).max
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_SECOND = np.uint64(0xBF58476D1CE4E5B9)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def build_inputs(prompts: Tokens, outputs: Tokens, documents: Int32) -> InputIndex:
    """Index the prompts of a corpus. The same rows in the same order give the same bytes.

    Memory peaks at about 40 bytes a prompt token.

    Args:
        prompts: One prompt a row; the last ``PROMPT_TOKENS`` tokens of each count.
        outputs: One output a row, without end-of-sequence.
        documents: ``int32[rows]`` number of each row's output in the corpus index.

    Raises:
        DraftError: The three do not have the same number of rows, or there are too many features.
    """
    rows = len(prompts)
    if not rows == len(outputs) == len(documents):
        raise DraftError(
            f"there are {rows} prompts, {len(outputs)} outputs and {len(documents)} document "
            "numbers; give one of each for every row"
        )
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
    """The features kept, ascending, where their postings begin, and the postings."""
    marks = _marks(prompts)
    keys, sizes = _count(marks)
    wide = sizes > WIDEST_SHARE * len(prompts)
    lone = (sizes == 1) & (keys & 1 == 1) & ~wide
    posted = np.repeat(~(wide | lone), sizes)
    postings = (marks[posted] & _LOW).astype(np.int32)
    if len(postings) > _LARGEST:
        raise DraftError(
            f"the prompts have {len(postings)} features, an index holds {_LARGEST}; "
            "shorten the prompts or index fewer rows"
        )
    # Wide features stay known, without postings: a prompt that has one is not unlike the rows.
    kept = np.where(wide, 0, sizes)[~lone]
    return keys[~lone], np.concatenate([[0], np.cumsum(kept)]).astype(np.int32), postings


def _weights(keys: UInt32, first: Int32, postings: Int32, outputs: Tokens) -> Float32:
    sizes = np.diff(first)
    purities = np.empty(len(keys))
    _measure(keys, first, postings, outputs.ids, outputs.offsets, purities)
    idf = np.log(len(outputs) / np.maximum(sizes, 1))
    return np.where(sizes > 0, idf * np.sqrt(purities), 0.0).astype(np.float32)


def _marks(prompts: Tokens) -> NDArray[np.uint64]:
    """``key << 32 | row`` of every feature of every row, sorted, each once."""
    kept = np.minimum(prompts.lengths, PROMPT_TOKENS)
    marks = np.empty(int((2 * kept - (kept > 0)).sum()), np.uint64)
    _emit(prompts.ids, prompts.offsets, marks)
    marks.sort()
    new = np.ones(len(marks), bool)
    new[1:] = marks[1:] != marks[:-1]
    return marks[new]


def _count(marks: NDArray[np.uint64]) -> tuple[UInt32, Int64]:
    """Each feature's key, and how many rows have it."""
    keys = (marks >> _HALF).astype(np.uint32)
    new = np.ones(len(keys), bool)
    new[1:] = keys[1:] != keys[:-1]
    return keys[new], np.diff(np.append(np.flatnonzero(new), len(keys)))


@compiled
def _emit(ids: Any, offsets: Any, marks: Any) -> None:
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
def _agreement(ids: Any, offsets: Any, a: int, b: int) -> float:
    """Tokens, end included, that two outputs share from the start / those of the longer one."""
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
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_SECOND
    mixed ^= mixed >> np.uint64(31)
    a = np.int64((mixed >> _HALF) * np.uint64(size) >> _HALF)
    b = np.int64((mixed & _LOW) * np.uint64(size - 1) >> _HALF)
    return a, (a + 1 + b) % size


@compiled
def _shared(ids: Any, offsets: Any) -> float:
    """The mean agreement of any two rows."""
    rows, agreed = len(offsets) - 1, 0.0
    if rows < 2:
        return LEAST_PURITY
    for draw in range(CORPUS_PAIRS):
        a, b = _pair(0, draw, rows)
        agreed += _agreement(ids, offsets, a, b)
    return agreed / CORPUS_PAIRS


@compiled
def _measure(keys: Any, first: Any, postings: Any, ids: Any, offsets: Any, purities: Any) -> None:
    """Fill each feature's purity; one of fewer than two rows gets the mean of the others."""
    shared = _shared(ids, offsets)
    total, measured = 0.0, 0
    for f in range(len(keys)):
        begin, size = first[f], first[f + 1] - first[f]
        if size < 2:
            continue
        pairs = min(size * (size - 1) // 2, FEATURE_PAIRS)
        agreed = shared
        for draw in range(pairs):
            a, b = _pair(np.uint64(keys[f]) << _HALF, draw, size)
            agreed += _agreement(ids, offsets, postings[begin + a], postings[begin + b])
        purities[f] = max(agreed / (pairs + 1), LEAST_PURITY)
        total += purities[f]
        measured += 1
    mean = total / measured if measured else max(shared, LEAST_PURITY)
    for f in range(len(keys)):
        if first[f + 1] - first[f] < 2:
            purities[f] = mean
