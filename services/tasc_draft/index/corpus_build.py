"""Build a corpus index from token ids, in steps that a distributed job calls as well.

The job: ``distinct`` once, ``splitters`` once, ``sort_part`` for each two neighbouring splitters on
any machine that sees the text, ``assemble`` once. The bytes are the same for any number of parts
and any order of documents. It reads no files and knows no tokenizer.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from tasc_draft.errors import DraftError
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.corpus_cap import by_gain
from tasc_draft.index.corpus_documents import Documents, distinct, keep
from tasc_draft.index.corpus_hot import hot_table
from tasc_draft.index.corpus_sort import DEPTH, sort_part, splitters
from tasc_draft.tokens import Int32, Tokens

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
