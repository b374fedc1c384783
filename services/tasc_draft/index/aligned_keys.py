"""Compiled words of a prompt, and the contexts that line an answer's words up with them.

A word is a run of tokens that begins where ``word_starts`` says so. It knows no text: what begins
a word is told by the tokenizer, and what a context predicts is the table's business.
"""

from typing import Any, NamedTuple

import numpy as np

from tasc_draft.compiled import borrowing
from tasc_draft.tokens import Int32

# From the widest context to the narrowest: see ``context_keys``.
KINDS = 6
NO_RECORD = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in Fibonacci hashing
_SHIFT = np.uint64(29)
_HALF = np.uint64(32)
_SEED = np.uint64(0xCBF29CE484222325)
_NO_WORD = np.uint64(1)  # a word's own hash may be the same; that is one collision more
_NO_TOKEN = np.uint64(0)


class AlignedView(NamedTuple):
    """The arrays of an ``AlignedTable``, as compiled code takes them; see there."""

    slots: Int32
    keys: Any
    first: Int32
    tokens: Int32
    counts: Int32
    totals: Int32


@borrowing
def begins(word_starts: Any, token: int) -> bool:
    """Whether a token begins a word; one that the tokenizer does not have does."""
    return token < 0 or token >= len(word_starts) or word_starts[token]


@borrowing
def words(prompt: Any, word_starts: Any, hashes: Any, lasts: Any) -> int:
    """Fill the hash and the last token of each word of a prompt; returns how many words.

    The first token begins a word whatever it is. A prompt of more words than ``hashes`` has places
    is cut behind the last whole word that fits.

    Args:
        prompt: ``int32[n]``.
        word_starts: ``bool[vocab_size + 1]``.
        hashes: ``uint32[m]``, filled; equal words have equal hashes.
        lasts: ``int32[m]``, filled.
    """
    n = 0
    h = _SEED
    for i in range(len(prompt)):
        token = prompt[i]
        if i == 0 or begins(word_starts, token):
            if n == len(hashes):
                break
            n += 1
            h = _SEED
        h = _mix(h, np.uint64(token))
        hashes[n - 1] = _folded(h)
        lasts[n - 1] = token
    return n


@borrowing
def context_keys(hashes: Any, lasts: Any, words: int, u: int, y1: int, y2: int, out: Any) -> None:
    """Fill ``out``, ``uint32[KINDS]``, with the keys of the next token's contexts.

    Kinds, each with the last token ``y1`` of the answer: 0 the aligned word; 1 that and ``y2``;
    2 that and the next word; 3 the aligned word's last token (an ending, of a word never seen) and
    ``y2``; 4 the word before, the aligned word and ``y2``; 5 the last tokens of the aligned word
    and of the next one and ``y2``.

    Args:
        hashes, lasts, words: What ``words`` filled and returned.
        u: The aligned word, counted from the prompt's begin; it may lie outside the prompt.
        y1, y2: The last token and the last but one; SEP in front of the answer, -1 before that.
    """
    word, last = _word(hashes, words, u), _last(lasts, words, u)
    behind, last_behind = _word(hashes, words, u + 1), _last(lasts, words, u + 1)
    one, two = np.uint64(y1 + 1), np.uint64(y2 + 1)
    by_word = _mix(_mix(_SEED, one), word)
    by_last = _mix(_mix(_mix(_SEED, two), one), last)
    out[0] = _folded(_mix(by_word, np.uint64(101)))
    out[1] = _folded(_mix(_mix(by_word, two), np.uint64(102)))
    out[2] = _folded(_mix(_mix(by_word, behind), np.uint64(103)))
    out[3] = _folded(_mix(by_last, np.uint64(104)))
    before = _mix(_mix(by_word, _word(hashes, words, u - 1)), two)
    out[4] = _folded(_mix(before, np.uint64(105)))
    out[5] = _folded(_mix(_mix(by_last, last_behind), np.uint64(106)))


@borrowing
def find(table: AlignedView, key: int) -> int:
    """The record of a key, or -1.

    Record r has the total ``table.totals[r]`` and the continuations
    ``[table.first[r], table.first[r + 1])`` of ``table.tokens`` and ``table.counts``.
    """
    bucket = (np.int64(key) * (len(table.slots) - 1)) >> 32
    for record in range(table.slots[bucket], table.slots[bucket + 1]):
        if table.keys[record] == key:
            return record
    return NO_RECORD


@borrowing
def _word(hashes: Any, words: int, at: int) -> Any:
    return np.uint64(hashes[at]) if 0 <= at < words else _NO_WORD


@borrowing
def _last(lasts: Any, words: int, at: int) -> Any:
    return np.uint64(lasts[at] + 1) if 0 <= at < words else _NO_TOKEN


@borrowing
def _mix(h: Any, value: Any) -> Any:
    h = (h ^ value) * _FACTOR
    return h ^ (h >> _SHIFT)


@borrowing
def _folded(h: Any) -> Any:
    """The high half: a product's low bits depend on few of its factors' bits."""
    return np.uint32((h * _FACTOR) >> _HALF)
