"""Build an aligned table from a task's rendered prompts and outputs, where they go word by word.

It finds out by itself whether they do, and where in the prompt the input begins; it knows no
template and no text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.index.aligned import WIDEST, AlignedTable, slots_of
from tasc_draft.index.aligned_keys import KINDS, begins, context_keys, words
from tasc_draft.tokens import Int32, Int64, Tokens

MIN_ROWS = 50
MIN_SHARE = 0.9  # of the rows, which go word by word
# Least count of a context, by kind. On 12,500 tagged sentences, leaving out what was seen once of
# these two kinds saves a quarter of the memory and costs no drafted token.
LEAST = (1, 2, 2, 1, 1, 1)

_HALF = np.uint64(32)

Pairs = NDArray[np.uint64]  # the context's key in the high half, the next token in the low half
Counted = tuple[Pairs, Int32]


def build_aligned(
    prompts: Tokens,
    outputs: Tokens,
    *,
    word_starts: NDArray[np.bool_],
    vocab_size: int,
    eos_id: int,
) -> AlignedTable | None:
    """Count the next token of every answer by the contexts of ``context_keys``.

    The same rows give the same bytes whatever their order. Memory peaks at about 130 bytes
    an output token.

    Args:
        prompts: Whole rendered prompts, the template's head and tail included.
        outputs: Of the same rows, without end-of-sequence.
        word_starts: ``bool[vocab_size + 1]``, whether a token begins a word.
        eos_id: Written behind each output.

    Returns:
        None where the task does not go word by word: fewer than 50 rows, or fewer than nine rows
        in ten whose prompts have as many words beyond the output's, those of the template.

    Raises:
        DraftError: The rows do not pair up, or an id is outside the vocabulary.
    """
    _check(prompts, outputs, word_starts, vocab_size, eos_id)
    if len(outputs) < MIN_ROWS:
        return None
    in_prompts = _word_counts(prompts.ids, prompts.offsets, word_starts)
    extra = in_prompts - _word_counts(outputs.ids, outputs.offsets, word_starts)
    head = _words_of_the_head(prompts.ids, prompts.offsets, word_starts)
    places = _aligned_rows(extra, head)
    if len(places) < MIN_SHARE * len(outputs):
        return None
    found = _kinds(prompts, outputs, places, int(in_prompts.max()), word_starts, eos_id, head)
    return _table(*_merged(found), vocab_size, head)


def _check(
    prompts: Tokens, outputs: Tokens, word_starts: NDArray[np.bool_], vocab_size: int, eos_id: int
) -> None:
    if len(prompts) != len(outputs):
        raise DraftError(f"{len(prompts)} prompts do not pair up with {len(outputs)} outputs")
    if len(word_starts) != vocab_size + 1:
        raise DraftError(
            f"word_starts has {len(word_starts)} entries, a vocabulary of {vocab_size} needs one "
            "more than ids; take it from the tokenizer"
        )
    for ids in (prompts.ids, outputs.ids, np.array([eos_id])):
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise DraftError(
                f"token id {wrong[0]} is outside the vocabulary of {vocab_size}; encode the rows "
                "with the target's own tokenizer"
            )


def _aligned_rows(extra: Int64, head: int) -> Int64:
    """Rows with the most frequent number of extra words that a template may have, or one more.

    One more, since many tokenizers make a full stop and the template's line break behind it a
    single token, but not a letter and a line break.
    """
    counts = np.bincount(extra[extra >= head] - head, minlength=1)
    usual = head + int((counts + np.append(counts[1:], 0)).argmax())
    return np.flatnonzero((extra == usual) | (extra == usual + 1))


def _kinds(
    prompts: Tokens, outputs: Tokens, places: Int64, most_words: int,
    word_starts: NDArray[np.bool_], eos_id: int, head: int,
) -> list[Counted]:  # fmt: skip
    pairs = np.empty((KINDS, int((outputs.lengths[places] + 1).sum())), np.uint64)
    _fill(
        prompts.ids, prompts.offsets, outputs.ids, outputs.offsets, places,
        np.empty(most_words, np.uint32), np.empty(most_words, np.int32),
        word_starts, eos_id, head, pairs,
    )  # fmt: skip
    return [_frequent(*each) for each in zip(pairs, LEAST, strict=True)]


def _frequent(pairs: Pairs, least: int) -> Counted:
    """Distinct pairs of one kind, ascending, and their counts, of contexts frequent enough."""
    pairs, counts = np.unique(pairs, return_counts=True)
    starts = np.flatnonzero(_new(pairs >> _HALF))
    totals = np.add.reduceat(counts, starts)
    kept = np.repeat(totals >= least, np.diff(np.append(starts, len(pairs))))
    return pairs[kept], counts[kept].astype(np.int32)


def _merged(kinds: Sequence[Counted]) -> Counted:
    """Distinct pairs, ascending, of all kinds: two kinds' contexts may share a key."""
    pairs = np.concatenate([pairs for pairs, _ in kinds])
    counts = np.concatenate([counts for _, counts in kinds])
    order = np.argsort(pairs, kind="stable")  # a merge sort, and these are sorted runs
    starts = np.flatnonzero(_new(pairs[order]))
    return pairs[order][starts], np.add.reduceat(counts[order], starts, dtype=np.int32)


def _table(pairs: Pairs, counts: Int32, vocab_size: int, head: int) -> AlignedTable:
    contexts = (pairs >> _HALF).astype(np.uint32)
    begin = np.flatnonzero(_new(contexts)).astype(np.int32)
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
    """Each context's pairs by falling count, then by token; and their places within it.

    ``begins[i]`` is where the context of pair i begins. Most contexts have a single pair, so only
    the others are sorted.
    """
    ranks = np.arange(len(pairs), dtype=np.int32) - begins
    several = ranks > 0
    several[:-1] |= several[1:]
    places = np.flatnonzero(several)
    order = places[np.lexsort((pairs[places], -counts[places], begins[places]))]
    pairs[places], counts[places] = pairs[order], counts[order]
    return pairs, counts, ranks


def _new(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a run of equal values begins."""
    new = np.ones(len(values), bool)
    new[1:] = values[1:] != values[:-1]
    return new


@compiled
def _word_counts(ids: Any, offsets: Any, word_starts: Any) -> Any:
    """``int64[texts]``: words of each text."""
    counts = np.zeros(len(offsets) - 1, np.int64)
    for text in range(len(counts)):
        for i in range(offsets[text], offsets[text + 1]):
            counts[text] += i == offsets[text] or begins(word_starts, ids[i])
    return counts


@compiled
def _words_of_the_head(ids: Any, offsets: Any, word_starts: Any) -> int:
    """Words of the token prefix common to nearly all texts, those that end in it.

    The last one does not where the input's first token goes on with it in most texts.
    """
    least = MIN_SHARE * (len(offsets) - 1)
    agreeing = np.ones(len(offsets) - 1, np.bool_)
    head, going_on = 0, False
    for place in range(ids.size):
        token, rows, more, continuing = _majority(ids, offsets, agreeing, place, word_starts)
        if rows < least:
            going_on = 2 * continuing > more
            break
        head += place == 0 or begins(word_starts, token)
        for text in range(len(agreeing)):
            at = offsets[text] + place
            agreeing[text] &= at < offsets[text + 1] and ids[at] == token
    return head - 1 if head > 0 and going_on else head


@compiled
def _majority(
    ids: Any, offsets: Any, agreeing: Any, place: int, word_starts: Any
) -> tuple[int, int, int, int]:
    """The token that more than half of the agreeing texts have at a place, if there is one.

    Also how many have it, how many texts are long enough, and how many of these go on with a word.
    Boyer and Moore's majority vote.
    """
    token, votes, more, continuing = -1, 0, 0, 0
    for text in range(len(agreeing)):
        at = offsets[text] + place
        if agreeing[text] and at < offsets[text + 1]:
            more += 1
            continuing += not begins(word_starts, ids[at])
            if votes == 0:
                token = ids[at]
            votes += 1 if ids[at] == token else -1
    rows = 0
    for text in range(len(agreeing)):
        at = offsets[text] + place
        rows += agreeing[text] and at < offsets[text + 1] and ids[at] == token
    return token, rows, more, continuing


@compiled
def _fill(
    prompts: Any, prompt_offsets: Any, outputs: Any, output_offsets: Any, places: Any,
    hashes: Any, lasts: Any, word_starts: Any, eos_id: int, head: int, pairs: Any,
) -> None:  # fmt: skip
    """A pair of each kind for each token of the outputs at ``places``, and for each EOS."""
    keys = np.zeros(KINDS, np.uint32)
    mark = len(word_starts) - 1
    n = 0
    for row in places:
        found = words(
            prompts[prompt_offsets[row] : prompt_offsets[row + 1]], word_starts, hashes, lasts
        )
        u, y1, y2 = head, mark, -1
        begin, end = output_offsets[row], output_offsets[row + 1]
        for i in range(begin, end + 1):
            token = outputs[i] if i < end else eos_id
            context_keys(hashes, lasts, found, u, y1, y2, keys)
            for kind in range(KINDS):
                pairs[kind, n] = (np.uint64(keys[kind]) << _HALF) | np.uint64(token)
            n += 1
            if i == begin or begins(word_starts, token):
                u += 1
            y2 = y1
            y1 = token
