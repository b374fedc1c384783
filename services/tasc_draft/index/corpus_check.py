"""Whether the arrays of a corpus index belong together. It repairs nothing.

The text is sorted again, so that damage to ``order`` cannot hide. How often each document occurs is
not in an index; that the counts can come from documents at all is seen by their flow: a gram occurs
as often as all grams that begin one token to the left of it, unless it begins a document. Arrays
that all belong to one other corpus pass: that is for a file's checksum to see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.index.corpus_documents import MARKS, MAX_DEPTH, MAX_VOCAB
from tasc_draft.index.corpus_hot import common_prefixes, hot_table
from tasc_draft.index.corpus_sort import precedes, read_only, sorted_places
from tasc_draft.index.lookup import END

if TYPE_CHECKING:
    from tasc_draft.index.corpus import CorpusIndex


def check_corpus(index: CorpusIndex) -> None:
    """Check every array of an index; compiled code, which checks no bounds, may then read it.

    Takes about as long and as much memory as the build.

    Raises:
        DraftError: It names the first part found wrong.
    """
    # Each check relies on those before it.
    for part, holds in (
        ("sizes", _sizes_hold),
        ("text", _text_holds),
        ("order or counts", _order_and_counts_hold),
        ("hot table", _hot_table_holds),
    ):
        if not holds(index):
            raise DraftError(f"the corpus index is damaged in its {part}; build the index again")


def _sizes_hold(index: CorpusIndex) -> bool:
    arrays = (*index.view, index.offsets)
    return (
        2 <= index.depth <= MAX_DEPTH
        and 0 < index.vocab_size <= MAX_VOCAB
        and all(a.dtype == np.int32 for a in arrays)
        and all(a.ndim == 1 for a in (*index.view[:3], index.offsets))
        and index.hot_slots.ndim == index.hot_next.ndim == 2
        and len(index.text) >= index.depth
        and len(index.offsets) >= 1
        and len(index.cumulative) == len(index.order) + 1
    )


def _text_holds(index: CorpusIndex) -> bool:
    text, offsets = index.text, index.offsets.astype(np.int64)
    behind = offsets[-1]
    if not (
        offsets[0] == 0
        and behind + index.depth == len(text)
        and (np.diff(offsets) >= MARKS).all()
        and text.min() >= END
        and text.max() <= index.vocab_size
    ):
        return False
    ends = np.concatenate([offsets[1:] - 1, np.arange(behind, len(text))])
    last = text[offsets[1:] - 2]
    return bool(
        np.array_equal(np.flatnonzero(text == END), ends)
        and np.array_equal(np.flatnonzero(text == index.vocab_size), offsets[:-1])
        and (last == last[:1]).all()
        and all_rise(read_only(text), offsets[:-1], len(text))
    )


def _order_and_counts_hold(index: CorpusIndex) -> bool:
    text, order = index.text, index.order
    places = sorted_places(text, index.depth)
    first = places >= 0
    if not np.array_equal(places[first], order):
        return False
    entries = np.cumsum(first, dtype=np.int32) - np.int32(1)
    counts = np.diff(index.cumulative.astype(np.int64))
    begins = text[order] == index.vocab_size
    entry_of = np.zeros(len(text), np.int32)
    entry_of[np.where(first, places, ~places)] = entries
    return bool(
        index.cumulative[0] == 0
        and index.cumulative[-1] == index.tokens
        and (counts >= np.bincount(entries, minlength=len(order))).all()
        and counts[begins].sum() == index.documents
        and _flow_holds(index, counts, entry_of)
    )


def _flow_holds(index: CorpusIndex, counts: NDArray[Any], entry_of: NDArray[Any]) -> bool:
    text, order = index.text, index.order
    shared = common_prefixes(read_only(text), read_only(order), index.depth)
    # The number of the gram one token shorter.
    shorter = np.cumsum(shared < index.depth - 1, dtype=np.int32) - np.int32(1)
    right = order + np.int32(1)
    goes_on = text[right] != END
    reached = shorter[entry_of[right[goes_on]]]
    inflow = np.bincount(reached, counts[goes_on], minlength=len(order))
    occurs = np.bincount(shorter, counts, minlength=len(order))
    inside = np.zeros(len(order), bool)
    inside[shorter] = text[order] != index.vocab_size
    return bool((inflow == occurs)[inside].all())


def _hot_table_holds(index: CorpusIndex) -> bool:
    made = hot_table(index.text, index.order, index.cumulative, index.depth)
    return all(np.array_equal(a, b) for a, b in zip(made, index.view[3:], strict=True))


@compiled
def all_rise(text: Any, starts: Any, longest: int) -> bool:
    """Whether each document is greater than the one before it."""
    i = 1
    while i < len(starts) and precedes(text, starts[i - 1], starts[i], longest):
        i += 1
    return i >= len(starts)
