"""The corpus index: a suffix array of a task's distinct outputs, with counts. It builds nothing.

The trie of all n-grams of ``SEP output EOS`` (TASC-spec, Tsur et al. 2026, arXiv 2602.24174,
section 5.2) is held as an array of text positions sorted by their next ``depth`` tokens, so that a
node is an interval of it (Manber & Myers 1993). It knows token ids, no strings and no files.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.index.corpus_documents import MARKS, MAX_DEPTH, MAX_VOCAB
from tasc_draft.index.corpus_hot import common_prefixes, hot_table
from tasc_draft.index.corpus_sort import DEPTH, precedes, read_only, sorted_places
from tasc_draft.index.lookup import COLUMNS, END
from tasc_draft.tokens import Int32

ARRAYS = (
    "text", "offsets", "order", "cumulative",
    "hot_slots", "hot_next",
)  # fmt: skip


class CorpusView(NamedTuple):
    """The arrays compiled code takes; see CorpusIndex for what they hold."""

    text: Int32
    order: Int32
    cumulative: Int32
    hot_slots: Int32
    hot_next: Int32


@dataclass(frozen=True)
class CorpusIndex:
    """Immutable, and the same bytes for the same multiset of documents.

    Attributes:
        fingerprint: Fingerprint of the tokenizer that made the ids.
        vocab_size: The tokenizer's; it is also the id of the document mark SEP.
        depth: Tokens by which positions are sorted; the longest n-gram that is counted.
        documents: How many documents were indexed, repeats counted.
        tokens: How many tokens they have, SEP and EOS included, repeats counted.
        text: ``int32[T]`` distinct documents in lexicographic order, each ``SEP output EOS END``
            (END = -1), then ``depth`` more ENDs, so that ``text[p + depth]`` exists for every p.
        offsets: ``int32[D + 1]`` where each distinct document begins; the last is behind them all.
        order: ``int32[S]`` the first position of each distinct ``depth``-gram (cut behind its
            first END), sorted by the gram's tokens, END first. No gram begins with END.
        cumulative: ``int32[S + 1]`` how often the grams before entry i occur, repeats counted.
        hot_slots: ``int32[2^m, 4]`` open addressing by ``slot_of(lo, depth)``, at most half full:
            (lo, depth, begin, n) of each interval of more than HOT entries and at least two
            different next tokens: its continuations are ``hot_next[begin : begin + n]``.
        hot_next: ``int32[*, 4]`` (token, count, lo, hi): a next token, how often it follows, and
            the interval one token deeper; of an interval the at most WIDEST most frequent, END left
            out, by falling count, then rising token.
    """

    fingerprint: str
    vocab_size: int
    depth: int
    documents: int
    tokens: int
    text: Int32
    offsets: Int32
    order: Int32
    cumulative: Int32
    hot_slots: Int32
    hot_next: Int32

    def __post_init__(self) -> None:
        # Read-only like a mapped file, so that compiled code sees one array type for both.
        for name in ARRAYS:
            getattr(self, name).setflags(write=False)

    @classmethod
    def empty(cls, fingerprint: str, vocab_size: int, depth: int = DEPTH) -> "CorpusIndex":
        """An index of no documents: every look-up misses."""
        none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
        return cls(
            fingerprint, vocab_size, depth, 0, 0,
            np.full(depth, END, np.int32), zero, none, zero.copy(),
            np.zeros((1, 4), np.int32), np.zeros((0, COLUMNS), np.int32),
        )  # fmt: skip

    @property
    def view(self) -> CorpusView:
        return CorpusView(*(getattr(self, name) for name in CorpusView._fields))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in ARRAYS)

    def check_integrity(self) -> None:
        """Raise DraftError unless every array is what a build of ``text`` makes; it sorts again."""
        _check(self)


def _check(index: CorpusIndex) -> None:
    """Check every array of an index; compiled code, which checks no bounds, may then read it.

    The text is sorted again, so that damage to ``order`` cannot hide. How often each document
    occurs is not in an index; that the counts can come from documents at all is seen by their flow:
    a gram occurs as often as all grams that begin one token to the left of it, unless it begins a
    document. Arrays that all belong to one other corpus pass: a file's checksum finds those. Takes
    about as long and as much memory as the build.

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
