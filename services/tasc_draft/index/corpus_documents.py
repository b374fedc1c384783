"""A corpus's distinct documents in one text, ordered by their tokens. No grams, no index.

The order does not depend on which document came first, so the same multiset of documents makes
the same bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.index.corpus_sort import DEPTH, read_only, sort_chosen
from tasc_draft.index.lookup import END
from tasc_draft.tokens import Int32, Tokens

# Three tokens and more fit a 64-bit sort key.
MAX_VOCAB = 2**21 - 3
# The hot table packs a depth into six bits.
MAX_DEPTH = 63
# Positions and counts are int32.
MAX_TEXT = 2**31 - 1
MARKS = 3  # SEP, EOS and END of each document


@dataclass(frozen=True)
class Documents:
    """Distinct documents.

    Attributes:
        text: ``int32[T]`` and ``offsets`` ``int32[D + 1]``: as in CorpusIndex.
        counts: ``int32[D]`` how often each occurs.
        rows: ``int32[rows]`` the document of each row it was made from; -1 where it was dropped.
    """

    text: Int32
    offsets: Int32
    counts: Int32
    rows: Int32

    def __post_init__(self) -> None:
        for array in (self.text, self.offsets, self.counts, self.rows):
            array.setflags(write=False)


def distinct(outputs: Tokens, *, vocab_size: int, eos_id: int, depth: int = DEPTH) -> Documents:
    """The distinct documents ``SEP output EOS END`` of a task's outputs.

    Args:
        outputs: Without end-of-sequence.
        depth: How many more ENDs to write behind the last document.

    Raises:
        DraftError: An id is outside the vocabulary, or the vocabulary or the corpus is too big.
    """
    _check(outputs, vocab_size, eos_id, depth)
    lengths = outputs.lengths + MARKS
    starts = np.concatenate([[0], np.cumsum(lengths)])
    marked = np.empty(starts[-1] + depth, np.int32)
    mark(read_only(outputs.ids), starts, vocab_size, eos_id, marked)
    places = sort_chosen(marked, starts[:-1].astype(np.int32), int(lengths.max(initial=2)))
    first = places >= 0
    number = np.cumsum(first, dtype=np.int32) - np.int32(1)
    rows = np.empty(len(places), np.int32)
    rows[np.searchsorted(starts, np.where(first, places, ~places))] = number
    chosen = np.searchsorted(starts, places[first])
    counts = np.bincount(rows, minlength=len(chosen)).astype(np.int32)
    return Documents(*_arrange(marked, starts[:-1][chosen], lengths[chosen], depth), counts, rows)


def keep(documents: Documents, kept: NDArray[np.bool_], depth: int) -> Documents:
    """The documents marked in ``bool[D]``, in the same order."""
    numbers = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    starts, lengths = documents.offsets[:-1][kept], np.diff(documents.offsets)[kept]
    text, offsets = _arrange(documents.text, starts, lengths, depth)
    return Documents(text, offsets, documents.counts[kept], numbers[documents.rows])


def _check(outputs: Tokens, vocab_size: int, eos_id: int, depth: int) -> None:
    ids = outputs.ids
    if not 0 < vocab_size <= MAX_VOCAB:
        raise DraftError(
            f"the vocabulary has {vocab_size} tokens, an index takes 1 to {MAX_VOCAB}; "
            "correct vocab_size in the model's config.json"
        )
    if not 0 <= eos_id < vocab_size:
        raise DraftError(
            f"the end-of-sequence id is {eos_id}, the vocabulary has {vocab_size}; "
            "correct eos_token_id in the model's config.json"
        )
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DraftError(
            f"corpus ids run from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}; "
            "tokenise the corpus with the target's own tokenizer"
        )
    if not 2 <= depth <= MAX_DEPTH:
        raise DraftError(
            f"depth is {depth}, grams have 2 to {MAX_DEPTH} tokens; leave it at {DEPTH}"
        )
    size = ids.size + MARKS * len(outputs) + depth
    if size > MAX_TEXT:
        raise DraftError(
            f"the corpus has {size} tokens, an index takes {MAX_TEXT}; index fewer documents"
        )


def _arrange(
    source: Int32, starts: NDArray[Any], lengths: NDArray[Any], depth: int
) -> tuple[Int32, Int32]:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    text = np.full(int(offsets[-1]) + depth, END, np.int32)
    copy(read_only(source), starts.astype(np.int64), offsets, text)
    return text, offsets


@compiled
def mark(ids: Any, starts: Any, sep: int, eos: int, text: Any) -> None:
    """Write ``SEP output EOS END`` of each output, and END behind them all."""
    at = 0
    for i in range(len(starts) - 1):
        begin, size = starts[i], starts[i + 1] - starts[i] - MARKS
        text[begin] = sep
        text[begin + 1 : begin + 1 + size] = ids[at : at + size]
        text[begin + 1 + size], text[begin + 2 + size] = eos, END
        at += size
    text[starts[-1] :] = END


@compiled
def copy(source: Any, starts: Any, offsets: Any, text: Any) -> None:
    """Copy the documents that begin at ``starts`` one behind the other."""
    for i in range(len(starts)):
        size = offsets[i + 1] - offsets[i]
        text[offsets[i] : offsets[i + 1]] = source[starts[i] : starts[i] + size]
