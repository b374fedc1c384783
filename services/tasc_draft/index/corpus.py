"""The corpus index: a suffix array of a task's distinct outputs, with counts.

The trie of all n-grams of ``SEP output EOS`` (TASC-spec, Tsur et al. 2026, arXiv 2602.24174,
section 5.2) is stored as an array of text positions, sorted by their next ``depth`` tokens. A node
of the trie is an interval of this array (Manber & Myers 1993). `corpus_build` builds the index.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasc_draft.compiled import IndexPart, flat, within
from tasc_draft.drafts import DraftError, Int32
from tasc_draft.index.corpus_sort import DEPTH
from tasc_draft.index.lookup import COLUMNS, END, WIDEST

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
        vocab_size: The tokenizer's vocabulary size, which is also the id of the document mark SEP.
        depth: Number of tokens by which positions are sorted: the length of the longest n-gram.
        documents: Number of documents, including repeats.
        tokens: Number of tokens of these documents, including SEP and EOS.
        text: ``int32[T]`` distinct documents in lexicographic order, each ``SEP output EOS END``
            (END = -1), then ``depth`` more ENDs, so that ``text[p + depth]`` exists for every p.
        offsets: ``int32[D + 1]`` where each distinct document begins; the last is their end.
        order: ``int32[S]`` the first position of each distinct ``depth``-gram (cut after its first
            END), sorted by the gram's tokens, END first. No gram begins with END.
        cumulative: ``int32[S + 1]`` how often the grams before entry i occur, including repeats.
        hot_slots: ``int32[2^m, 4]`` hash table by ``slot_of(lo, depth)``, open addressing, at most
            half full. (lo, depth, begin, n) of each interval with more than HOT entries and at
            least two different next tokens; ``hot_next[begin : begin + n]`` are its continuations.
        hot_next: ``int32[*, 4]`` (token, count, lo, hi): a next token, how often it follows, and
            the interval one token deeper. Each interval has its WIDEST most frequent next tokens
            without END, by falling count, then rising token.
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
        """Raise DraftError unless compiled code, which checks no bounds, stays in the arrays.

        An index that passes may still be wrong. Its drafts are then worse; answers are the same.
        """
        # Each check relies on the previous checks.
        for part, holds in (
            ("sizes", _sizes_hold),
            ("text", _text_holds),
            ("order or counts", _order_and_counts_hold),
            ("hot table", _hot_table_holds),
        ):
            if not holds(self):
                raise DraftError(f"the corpus index is damaged in its {part}; build it again")


def _sizes_hold(index: CorpusIndex) -> bool:
    hot = index.hot_slots, index.hot_next
    return (
        2 <= index.depth <= MAX_DEPTH
        and 0 < index.vocab_size <= MAX_VOCAB
        and flat(np.int32, index.text, index.offsets, index.order, index.cumulative)
        and all(array.dtype == np.int32 and array.shape[1:] == (COLUMNS,) for array in hot)
        and len(index.text) >= index.depth
        and len(index.offsets) >= 1
        and len(index.cumulative) == len(index.order) + 1
    )


def _text_holds(index: CorpusIndex) -> bool:
    text, offsets = index.text, index.offsets.astype(np.int64)
    return bool(
        offsets[0] == 0
        and offsets[-1] + index.depth == len(text)
        and (np.diff(offsets) >= MARKS).all()
        and END <= text.min() <= text.max() <= index.vocab_size
        and np.array_equal(
            np.flatnonzero(text == END),
            np.concatenate([offsets[1:] - 1, np.arange(offsets[-1], len(text))]),
        )
    )


def _order_and_counts_hold(index: CorpusIndex) -> bool:
    counts = index.cumulative
    return bool(
        within(index.order, len(index.text) - index.depth)
        and counts[0] == 0
        and (counts[1:] > counts[:-1]).all()
    )


def _hot_table_holds(index: CorpusIndex) -> bool:
    slots, (begins, sizes) = len(index.hot_slots), index.hot_slots[:, 2:].T
    tokens, counts, los, his = index.hot_next.T
    return bool(
        # A search visits slot after slot until it finds an empty one.
        slots & (slots - 1) == 0
        and np.count_nonzero(sizes) < slots
        and within(sizes, WIDEST + 1)
        and ((begins >= 0) & (begins <= len(tokens) - sizes)).all()
        and within(tokens, index.vocab_size + 1)
        and ((los >= 0) & (los < his) & (his <= len(index.order))).all()
        and np.array_equal(counts, index.cumulative[his] - index.cumulative[los])
    )
