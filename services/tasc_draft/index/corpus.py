"""The corpus index: a suffix array of a task's distinct outputs, with counts. It builds nothing.

The trie of all n-grams of ``SEP output EOS`` (TASC-spec, Tsur et al. 2026, arXiv 2602.24174,
section 5.2) is held as an array of text positions sorted by their next ``depth`` tokens, so that a
node is an interval of it (Manber & Myers 1993). It knows token ids, no strings and no files.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasc_draft.index.corpus_check import check_corpus
from tasc_draft.index.corpus_sort import DEPTH
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
        check_corpus(self)
