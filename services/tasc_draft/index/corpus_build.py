"""Build a corpus index from token ids, in steps that a distributed job calls as well.

The job calls ``distinct`` once, ``splitters`` once, ``sort_part`` for each two neighbouring
splitters on any machine that has the text, and ``assemble`` once. The bytes are the same for any
number of parts and any order of documents.

Where an index would be larger than allowed, the documents with the least expected gain are left
out. The gain of a document is how often its tokens would be predicted for other documents: each of
its grams of GAIN_TOKENS tokens predicts its last token wherever else the gram occurs. A gram that k
kept places already have counts 1 / (1 + k)^2. Without this discount the most similar documents are
kept, and drafts are worse than with documents drawn at random.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tasc_draft.compiled import compiled
from tasc_draft.errors import DraftError
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.corpus_documents import Documents, distinct, keep
from tasc_draft.index.corpus_hot import hot_table
from tasc_draft.index.corpus_sort import DEPTH, sort_part, sorted_places, splitters
from tasc_draft.tokens import Int32, Int64, Tokens

# Replayed on five tasks cut to a half and a fifth, 8 did best of 3, 4, 6, 8 and 12.
GAIN_TOKENS = 8
# Each looks for half the gain of the one before it; what the last leaves is worth next to nothing.
SWEEPS = 16


def by_gain(documents: Documents) -> Int64:
    """Document numbers, those of most expected gain a token first; deterministic.

    Greedy for a sum of diminishing gains, by falling thresholds (Badanidiyuru & Vondrak 2014).
    """
    places = sorted_places(documents.text, GAIN_TOKENS)
    first = places >= 0
    places = np.where(first, places, ~places)
    grams = np.cumsum(first, dtype=np.int32) - np.int32(1)
    gram_of = np.zeros(len(documents.text), np.int32)
    gram_of[places] = grams
    weights = np.repeat(documents.counts, np.diff(documents.offsets))[places]
    elsewhere = np.bincount(grams, weights) - 1.0
    return ranked(gram_of, elsewhere, documents.offsets)


@compiled
def ranked(gram_of: Any, elsewhere: Any, offsets: Any) -> Any:
    """Sweep over the documents, each time taking those above half the last threshold."""
    documents = len(offsets) - 1
    held = np.zeros(len(elsewhere), np.int32)
    taken = np.zeros(documents, np.bool_)
    ranking = np.empty(documents, np.int64)
    threshold, n = 0.0, 0
    for document in range(documents):
        gain = gain_of(gram_of[offsets[document] : offsets[document + 1] - 1], elsewhere, held)
        threshold = max(threshold, gain)
    for sweep in range(SWEEPS + 1):
        for document in range(documents):
            if taken[document]:
                continue
            grams = gram_of[offsets[document] : offsets[document + 1] - 1]
            if sweep == SWEEPS or gain_of(grams, elsewhere, held) >= threshold:
                taken[document], ranking[n] = True, document
                n += 1
                for gram in grams:
                    held[gram] += 1
        threshold /= 2.0
    return ranking


@compiled
def gain_of(grams: Any, elsewhere: Any, held: Any) -> float:
    """The expected gain a token of a document, END left out, beside those already taken."""
    gain = 0.0
    for gram in grams:
        gain += elsewhere[gram] / (1.0 + held[gram]) ** 2
    return gain / len(grams)


__all__ = [
    "DEPTH",
    "Documents",
    "Parts",
    "assemble",
    "build_corpus",
    "check_cap",
    "distinct",
    "index_documents",
    "sort_part",
    "splitters",
]

Parts: TypeAlias = Sequence[tuple[Int32, Int32]]
"""What ``sort_part`` gives of each part of a text, in order."""

# A second attempt at a byte cap aims a little lower, so that few are needed.
_CAUTION = 0.99


def build_corpus(
    outputs: Tokens, *, fingerprint: str, vocab_size: int, eos_id: int, depth: int = DEPTH,
    max_bytes: int | None = None,
) -> CorpusIndex:  # fmt: skip
    """Index the n-grams of ``SEP output EOS`` of a task's outputs.

    Memory peaks below 60 bytes a token.

    Args:
        outputs: Token ids without end-of-sequence.
        fingerprint: Of the tokenizer that made the ids.
        eos_id: Written behind each document.
        depth: Tokens of the longest gram.
        max_bytes: See ``index_documents``.

    Raises:
        DraftError: An id is outside the vocabulary, a size is out of range, or no index is as small
            as ``max_bytes``.
    """
    documents = distinct(outputs, vocab_size=vocab_size, eos_id=eos_id, depth=depth)
    return index_documents(
        documents, fingerprint=fingerprint, vocab_size=vocab_size, depth=depth, max_bytes=max_bytes
    )[0]


def check_cap(max_bytes: int | None, depth: int = DEPTH) -> None:
    """Raise DraftError if not even an index of no documents takes so few bytes; None is no cap."""
    least = CorpusIndex.empty("", 1, depth).nbytes
    if max_bytes is not None and max_bytes < least:
        raise DraftError(
            f"max_bytes is {max_bytes}, an index of no documents takes {least}; raise it"
        )


def index_documents(
    documents: Documents, *, fingerprint: str, vocab_size: int, depth: int = DEPTH,
    max_bytes: int | None = None, sort: Callable[[Documents], Parts] | None = None,
    pruned: Callable[[int], None] = lambda times: None,
) -> tuple[CorpusIndex, Documents]:  # fmt: skip
    """Index distinct documents, as many as fit ``max_bytes`` of arrays.

    Where all do not fit, documents are kept by falling expected gain a token (``by_gain``) as far
    as the bytes a token of the last attempt allow, until they fit.

    Args:
        sort: Sorts a text to ``depth``, in any number of parts; by default here and in one.
        pruned: Where not all fit, told how often documents were chosen and sorted anew: 0 first.

    Returns:
        The index and the documents in it; a dropped document's rows have number -1.

    Raises:
        DraftError: Not even an index of no documents fits.
    """

    def in_one(some: Documents) -> Parts:
        return [sort_part(some.text, some.offsets, some.counts, depth)]

    def indexed(some: Documents) -> CorpusIndex:
        parts = (sort or in_one)(some)
        return assemble(some, parts, fingerprint=fingerprint, vocab_size=vocab_size, depth=depth)

    check_cap(max_bytes, depth)
    index, kept = indexed(documents), documents
    if max_bytes is None or index.nbytes <= max_bytes:
        return index, kept
    times = 0
    pruned(times)
    ranking = by_gain(documents)
    ends = np.cumsum(np.diff(documents.offsets)[ranking]) + depth
    while index.nbytes > max_bytes:
        room = len(kept.text) * (max_bytes / index.nbytes) * _CAUTION
        chosen = np.zeros(len(ranking), bool)
        chosen[ranking[ends <= room]] = True
        kept = keep(documents, chosen, depth)
        index = indexed(kept)
        times += 1
        pruned(times)
    return index, kept


def assemble(
    documents: Documents, parts: Parts, *,
    fingerprint: str, vocab_size: int, depth: int = DEPTH,
) -> CorpusIndex:  # fmt: skip
    """Join sorted parts, in order, to the index of the documents they were sorted from."""
    order = np.concatenate([part[0] for part in parts])
    cumulative = np.zeros(len(order) + 1, np.int32)
    np.cumsum(np.concatenate([part[1] for part in parts]), out=cumulative[1:])
    return CorpusIndex(
        fingerprint, vocab_size, depth, int(documents.counts.sum()), int(cumulative[-1]),
        documents.text, documents.offsets, order, cumulative,
        *hot_table(documents.text, order, cumulative, depth),
    )  # fmt: skip
