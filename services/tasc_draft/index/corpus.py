"""The corpus index: a suffix array of a task's distinct outputs, with counts.

The trie of all n-grams of ``SEP output EOS`` (TASC-spec, Tsur et al. 2026, arXiv 2602.24174,
section 5.2) is stored as an array of text positions sorted by their next ``depth`` tokens, so that
a node of the trie is an interval of it (Manber & Myers 1993). `corpus_build` builds it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import IndexPart, compiled, read_only
from tasc_draft.errors import DraftError
from tasc_draft.index.corpus_sort import DEPTH, precedes, sorted_places
from tasc_draft.index.lookup import COLUMNS, END, common_prefixes, hot_table
from tasc_draft.tokens import Int32

MAX_VOCAB = 2**21 - 3  # three tokens fit a 64-bit sort key
MAX_DEPTH = 63  # the hot table packs a depth into six bits
MAX_TEXT = 2**31 - 1  # positions and counts are int32
MARKS = 3  # SEP, EOS and END of each document


class CorpusView(NamedTuple):
    """The arrays of a `CorpusIndex` that compiled code takes."""

    text: Int32
    order: Int32
    cumulative: Int32
    hot_slots: Int32
    hot_next: Int32


@dataclass(frozen=True)
class CorpusIndex(IndexPart):
    """Immutable suffix array. The same multiset of documents gives the same bytes.

    Attributes:
        fingerprint: The fingerprint of the tokenizer that made the ids.
        vocab_size: The tokenizer's; also the id of the document mark SEP.
        depth: Number of tokens by which positions are sorted: the length of the longest n-gram.
        documents: Number of documents, repeats counted.
        tokens: Number of their tokens, SEP and EOS included, repeats counted.
        text: ``int32[T]`` distinct documents in lexicographic order, each ``SEP output EOS END``
            (END = -1), then ``depth`` more ENDs, so that ``text[p + depth]`` exists for every p.
        offsets: ``int32[D + 1]`` where each distinct document begins; the last is their end.
        order: ``int32[S]`` the first position of each distinct ``depth``-gram (cut after its first
            END), sorted by the gram's tokens, END first. No gram begins with END.
        cumulative: ``int32[S + 1]`` how often the grams before entry i occur, repeats counted.
        hot_slots: ``int32[2^m, 4]`` hash table by ``slot_of(lo, depth)``, open addressing, at most
            half full. (lo, depth, begin, n) of each interval with more than HOT entries and at
            least two different next tokens; ``hot_next[begin : begin + n]`` are its continuations.
        hot_next: ``int32[*, 4]`` (token, count, lo, hi): a next token, how often it follows, and
            the interval one token deeper. Each interval has its WIDEST most frequent ones without
            END, by falling count, then rising token.
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

    @classmethod
    def empty(cls, fingerprint: str, vocab_size: int, depth: int = DEPTH) -> "CorpusIndex":
        """An index without documents."""
        text, order = np.full(depth, END, np.int32), np.zeros(0, np.int32)
        offsets, cumulative = np.zeros((2, 1), np.int32)
        hot = np.zeros((1, 4), np.int32), np.zeros((0, COLUMNS), np.int32)
        sizes = depth, 0, 0
        return cls(fingerprint, vocab_size, *sizes, text, offsets, order, cumulative, *hot)

    @property
    def view(self) -> CorpusView:
        return CorpusView(*(getattr(self, name) for name in CorpusView._fields))

    def check_integrity(self) -> None:
        """Check every array, so that compiled code, which checks no bounds, may read them.

        The text is sorted again and compared with ``order``. An index does not say how often each
        document occurs, but the counts must be consistent: unless a gram begins a document, it
        occurs as often as all grams that begin one token to its left. The check passes for the
        arrays of another corpus; a file's checksum finds those. It takes about as long and as much
        memory as the build.

        Raises:
            DraftError: The message names the first part found wrong.
        """
        # Each check relies on those before it.
        for part, holds in (
            ("sizes", _sizes_hold),
            ("text", _text_holds),
            ("order or counts", _order_and_counts_hold),
            ("hot table", _hot_table_holds),
        ):
            if not holds(self):
                raise DraftError(f"the corpus index is damaged in its {part}; build it again")


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
    # For each entry, the number of its gram without the last token.
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
