"""Predicts answers whose words follow the words of the prompt, one by one, as in tagging.

The likeliest next token then depends on the prompt's word at the same place. The table maps
contexts (`context_keys`) to counts of the next token. `build_aligned` determines whether a task's
answers follow the prompt word by word, and where in the prompt the input begins; it needs no
template.

A word is a run of tokens. ``word_starts``, which the tokenizer provides, marks the tokens that
begin a word.
"""

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import IndexPart, borrowing, compiled, flat, within
from tasc_draft.drafts import DraftError, Int32, Int64, Tokens, is_first

KINDS = 6  # kinds of contexts; see `context_keys`
NO_RECORD = -1
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in Fibonacci hashing
_SHIFT = np.uint64(29)
_HALF = np.uint64(32)
_SEED = np.uint64(0xCBF29CE484222325)
_NO_WORD = np.uint64(1)  # may equal the hash of a word: one more collision
_NO_TOKEN = np.uint64(0)


# The arrays of an `AlignedTable` for compiled code.
AlignedView: Any = namedtuple("AlignedView", "slots keys first tokens counts totals")


@borrowing
def begins(word_starts: Any, token: int) -> bool:
    """Whether a token begins a word. Ids without a token count as beginnings."""
    return token < 0 or token >= len(word_starts) or word_starts[token]


@borrowing
def words(prompt: Any, word_starts: Any, hashes: Any, lasts: Any) -> int:
    """Fill the hash and the last token of each word of a prompt; returns the number of words.

    The first token always begins a word. Words beyond the first m are left out.

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

    Each context contains the last token ``y1`` of the answer and, by kind:

    - 0: the aligned word;
    - 1: the aligned word and ``y2``;
    - 2: the aligned word and the next word;
    - 3: the aligned word's last token, which is an ending that unseen words share, and ``y2``;
    - 4: the previous word, the aligned word and ``y2``;
    - 5: the last tokens of the aligned word and of the next word, and ``y2``.

    Args:
        hashes, lasts: The arrays that `words` filled.
        words: The number that `words` returned.
        u: Number of the aligned word in the prompt; it may lie outside the prompt.
        y1, y2: The last token of the answer and the token before it. SEP precedes the answer, and
            -1 precedes SEP.
    """
    word, last = _word(hashes, words, u), _last(lasts, words, u)
    following, last_following = _word(hashes, words, u + 1), _last(lasts, words, u + 1)
    one, two = np.uint64(y1 + 1), np.uint64(y2 + 1)
    by_word = _mix(_mix(_SEED, one), word)
    by_last = _mix(_mix(_mix(_SEED, two), one), last)
    out[0] = _folded(_mix(by_word, np.uint64(101)))
    out[1] = _folded(_mix(_mix(by_word, two), np.uint64(102)))
    out[2] = _folded(_mix(_mix(by_word, following), np.uint64(103)))
    out[3] = _folded(_mix(by_last, np.uint64(104)))
    before = _mix(_mix(by_word, _word(hashes, words, u - 1)), two)
    out[4] = _folded(_mix(before, np.uint64(105)))
    out[5] = _folded(_mix(_mix(by_last, last_following), np.uint64(106)))


@borrowing
def find(table: Any, key: int) -> int:
    """The number of a key's record, or NO_RECORD."""
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
    """The high half of a product, since the low bits depend on few bits of the factors."""
    return np.uint32((h * _FACTOR) >> _HALF)


WIDEST = 8  # maximum continuations of one context
MAX_HEAD = 2**30  # numbers of words are int32


def slots_of(keys: NDArray[np.uint32], buckets: int) -> Int32:
    """``int32[buckets + 1]``: where each bucket of ascending keys begins."""
    scaled = np.arange(buckets, dtype=np.uint64) << np.uint64(32)
    smallest = (scaled + np.uint64(buckets - 1)) // np.uint64(buckets)
    return np.append(np.searchsorted(keys, smallest.astype(np.uint32)), len(keys)).astype(np.int32)


@dataclass(frozen=True)
class AlignedTable(IndexPart):
    """Immutable counts of the next token by context.

    Attributes:
        vocab_size: The tokenizer's vocabulary size; all tokens are below it.
        head: Number of words of the prompt template in front of the input.
        slots: ``int32[B + 1]``; the keys with ``key * B >> 32 = b`` are ``[slots[b], slots[b+1])``.
        keys: ``uint32[K]`` hashed contexts, ascending; one record each.
        first: ``int32[K + 1]``; the continuations of record r are ``[first[r], first[r + 1])`` of
            ``tokens`` and ``counts``, at most ``WIDEST``.
        tokens: ``int32[C]`` next tokens; within a record by falling count, then by token.
        counts: ``int32[C]`` how often each token follows.
        totals: ``int32[K]`` how often each context occurs, including dropped continuations.
    """

    vocab_size: int
    head: int
    slots: Int32
    keys: NDArray[np.uint32]
    first: Int32
    tokens: Int32
    counts: Int32
    totals: Int32

    @property
    def view(self) -> Any:
        return AlignedView(**self.arrays)

    def check_integrity(self) -> None:
        """Raise DraftError unless compiled code, which checks no bounds, stays in the arrays."""
        first, keys = self.first, self.keys
        # Later checks rely on earlier checks.
        if not (
            0 <= self.head <= MAX_HEAD
            and flat(np.int32, self.slots, first, self.tokens, self.counts, self.totals)
            and flat(np.uint32, keys)
            and len(self.slots) >= 2
            and len(first) == len(keys) + 1 == len(self.totals) + 1
            and first[0] == 0
            and first[-1] == len(self.tokens) == len(self.counts)
            and (first[1:] >= first[:-1]).all()
            and np.array_equal(self.slots, slots_of(keys, len(self.slots) - 1))
            and within(self.tokens, self.vocab_size)
            and (self.totals >= 1).all()
        ):
            raise DraftError("the aligned table is damaged; build the index again")


MIN_ROWS = 50
MIN_SHARE = 0.9  # minimum share of rows whose answers follow the prompt word by word
# Minimum count of a context, by kind. On 12,500 tagged sentences this saves a quarter of the memory
# and costs no drafted token.
MIN_TOTALS = (1, 2, 2, 1, 1, 1)

Pairs = NDArray[np.uint64]  # key of the context in the high half, next token in the low half
Counted = tuple[Pairs, Int32]


def build_aligned(
    prompts: Tokens,
    outputs: Tokens,
    *,
    word_starts: NDArray[np.bool_],
    vocab_size: int,
    eos_id: int,
) -> AlignedTable | None:
    """Count the next tokens of all answers by the contexts of `context_keys`.

    The order of the rows does not change the result. Memory peaks at about 130 bytes per output
    token.

    Args:
        prompts: Whole rendered prompts, with the template's text before and after the input.
        outputs: Outputs of the same rows, without end-of-sequence.
        word_starts: ``bool[vocab_size + 1]``, whether a token begins a word.
        eos_id: Appended to each output.

    Returns:
        None if the answers do not follow the prompt word by word. This is assumed if the task has
        fewer than MIN_ROWS rows, or if the share of rows in which the prompt exceeds the output by
        the usual number of words is below MIN_SHARE.
    """
    if len(outputs) < MIN_ROWS:
        return None
    head = _words_of_the_head(prompts.view, word_starts)
    counts = [_word_counts(texts.view, word_starts) for texts in (prompts, outputs)]
    rows = _aligned_rows(counts[0] - counts[1], head)
    if len(rows) < MIN_SHARE * len(outputs):
        return None
    pairs = np.empty((KINDS, int((outputs.lengths[rows] + 1).sum())), np.uint64)
    _fill(prompts.view, outputs.view, rows, word_starts, eos_id, head, pairs)
    kinds = [_frequent(*each) for each in zip(pairs, MIN_TOTALS, strict=True)]
    return _table(*_merged(kinds), vocab_size, head)


def _aligned_rows(extra: Int64, head: int) -> Int64:
    """The rows whose prompt exceeds the output by the usual number of words, or by one more.

    Many tokenizers join a full stop and the template's line break to one token, but not a letter
    and a line break, so that rows of one task differ by one word.
    """
    counts = np.bincount(extra[extra >= head] - head, minlength=1)
    usual = head + int((counts + np.append(counts[1:], 0)).argmax())
    return np.flatnonzero((extra == usual) | (extra == usual + 1))


def _frequent(pairs: Pairs, min_total: int) -> Counted:
    """The distinct pairs of one kind whose context is frequent enough, ascending, with counts."""
    pairs, counts = np.unique(pairs, return_counts=True)
    starts = np.flatnonzero(is_first(pairs >> _HALF))
    totals = np.add.reduceat(counts, starts)
    kept = np.repeat(totals >= min_total, np.diff(np.append(starts, len(pairs))))
    return pairs[kept], counts[kept].astype(np.int32)


def _merged(kinds: Sequence[Counted]) -> Counted:
    """Distinct pairs of all kinds, ascending. Contexts of two kinds may have the same key."""
    pairs = np.concatenate([pairs for pairs, _ in kinds])
    counts = np.concatenate([counts for _, counts in kinds])
    order = np.argsort(pairs, kind="stable")  # merges the sorted runs of the input
    starts = np.flatnonzero(is_first(pairs[order]))
    return pairs[order][starts], np.add.reduceat(counts[order], starts, dtype=np.int32)


def _table(pairs: Pairs, counts: Int32, vocab_size: int, head: int) -> AlignedTable:
    contexts = (pairs >> _HALF).astype(np.uint32)
    begin = np.flatnonzero(is_first(contexts)).astype(np.int32)
    sizes = np.diff(begin, append=np.int32(len(pairs)))
    pairs, counts, ranks = _by_count(pairs, counts, np.repeat(begin, sizes))
    kept = ranks < WIDEST
    keys = contexts[begin]
    return AlignedTable(
        vocab_size=vocab_size,
        head=head,
        slots=slots_of(keys, max(1, len(keys) // 2)),
        keys=keys,
        first=np.append(0, np.cumsum(np.minimum(sizes, WIDEST))).astype(np.int32),
        tokens=(pairs[kept] & np.uint64(0xFFFFFFFF)).astype(np.int32),
        counts=counts[kept],
        totals=np.add.reduceat(counts, begin, dtype=np.int32),
    )


def _by_count(pairs: Pairs, counts: Int32, begins: Int32) -> tuple[Pairs, Int32, Int32]:
    """Sort each context's pairs by falling count, then by token; also returns the pairs' ranks.

    ``begins[i]`` is where the context of pair i begins. Most contexts have a single pair, so only
    contexts with several pairs are sorted.
    """
    ranks = np.arange(len(pairs), dtype=np.int32) - begins
    several = ranks > 0
    several[:-1] |= several[1:]
    places = np.flatnonzero(several)
    order = places[np.lexsort((pairs[places], -counts[places], begins[places]))]
    pairs[places], counts[places] = pairs[order], counts[order]
    return pairs, counts, ranks


@compiled
def _word_counts(texts: Any, word_starts: Any) -> Any:
    """``int64[texts]``: the number of words of each text."""
    ids, offsets = texts
    counts = np.zeros(len(offsets) - 1, np.int64)
    for text in range(len(counts)):
        for i in range(offsets[text], offsets[text + 1]):
            counts[text] += i == offsets[text] or begins(word_starts, ids[i])
    return counts


@compiled
def _words_of_the_head(texts: Any, word_starts: Any) -> int:
    """Number of words in the token prefix that nearly all texts share.

    The last word does not count if the next token continues it in most texts.
    """
    ids, offsets = texts
    min_rows = MIN_SHARE * (len(offsets) - 1)
    agreeing = np.ones(len(offsets) - 1, np.bool_)
    head, continued = 0, False
    for place in range(ids.size):
        token, rows, longer, continuing = _majority(texts, agreeing, place, word_starts)
        if rows < min_rows:
            continued = 2 * continuing > longer
            break
        head += place == 0 or begins(word_starts, token)
        for text in range(len(agreeing)):
            at = offsets[text] + place
            agreeing[text] &= at < offsets[text + 1] and ids[at] == token
    return head - 1 if head > 0 and continued else head


@compiled
def _majority(texts: Any, agreeing: Any, place: int, word_starts: Any) -> tuple[int, int, int, int]:
    """The token that more than half of the agreeing texts have at a place, if there is one.

    Uses Boyer and Moore's majority vote. Also returns how many texts have the token, how many texts
    are long enough, and how many of the long enough texts continue a word at this place.
    """
    ids, offsets = texts
    token, votes, longer, continuing = -1, 0, 0, 0
    for text in range(len(agreeing)):
        at = offsets[text] + place
        if agreeing[text] and at < offsets[text + 1]:
            longer += 1
            continuing += not begins(word_starts, ids[at])
            if votes == 0:
                token = ids[at]
            votes += 1 if ids[at] == token else -1
    rows = 0
    for text in range(len(agreeing)):
        at = offsets[text] + place
        rows += agreeing[text] and at < offsets[text + 1] and ids[at] == token
    return token, rows, longer, continuing


@compiled
def _fill(
    prompts: Any, outputs: Any, rows: Any, word_starts: Any, eos_id: int, head: int, pairs: Any
) -> None:
    """Fill ``pairs`` with one pair per kind for each output token of these rows and each EOS."""
    longest = np.diff(prompts.offsets).max()
    hashes, lasts = np.empty(longest, np.uint32), np.empty(longest, np.int32)
    keys = np.zeros(KINDS, np.uint32)
    sep = len(word_starts) - 1
    n = 0
    for row in rows:
        prompt = prompts.ids[prompts.offsets[row] : prompts.offsets[row + 1]]
        found = words(prompt, word_starts, hashes, lasts)
        u, y1, y2 = head, sep, -1
        begin, end = outputs.offsets[row], outputs.offsets[row + 1]
        for i in range(begin, end + 1):
            token = outputs.ids[i] if i < end else eos_id
            context_keys(hashes, lasts, found, u, y1, y2, keys)
            for kind in range(KINDS):
                pairs[kind, n] = (np.uint64(keys[kind]) << _HALF) | np.uint64(token)
            n += 1
            if i == begin or begins(word_starts, token):
                u += 1
            y2 = y1
            y1 = token
