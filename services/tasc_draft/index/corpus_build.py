"""Builds a corpus index from token ids, in steps that a distributed job also calls.

The job calls `distinct` once, `splitters` once, `sort_part` for each pair of neighbouring splitters
on any machine that has the text, and `assemble` once. The index's bytes do not depend on the number
of parts or on the order of documents.

If an index would be larger than allowed, the documents with the least expected gain are left out.
The gain of a document is how many tokens of other documents it would help to predict: each of its
grams of GAIN_TOKENS tokens predicts the gram's last token wherever else the gram occurs. A gram
that the kept documents already contain k times counts 1 / (1 + k)^2. Without this discount, the
documents most similar to each other would be kept, and drafts would be worse than with documents
drawn at random.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasc_draft.compiled import IndexPart, compiled, read_only
from tasc_draft.drafts import DraftError, Int32, Int64, Tokens
from tasc_draft.index.corpus import MARKS, MAX_DEPTH, MAX_TEXT, MAX_VOCAB, CorpusIndex
from tasc_draft.index.corpus_sort import DEPTH, sort_chosen, sort_part, sorted_places
from tasc_draft.index.lookup import END, hot_table

Parts: TypeAlias = Sequence[tuple[Int32, Int32]]
"""The results of `sort_part` for each part of a text, in order."""

# The best of 3, 4, 6, 8 and 12 on five tasks, with the corpus cut to a half and to a fifth.
GAIN_TOKENS = 8
SWEEPS = 16  # each sweep halves the minimum gain; further sweeps would change almost nothing
_CAUTION = 0.99  # attempts aim at this share of the byte limit, so that few attempts are needed


@dataclass(frozen=True)
class Documents(IndexPart):
    """Distinct documents, sorted by their tokens.

    Attributes:
        text, offsets: ``int32[T]`` and ``int32[D + 1]``, as in `CorpusIndex`.
        counts: ``int32[D]``, the number of occurrences of each document.
        rows: ``int32[rows]`` number of each row's document; -1 if it was dropped.
    """

    text: Int32
    offsets: Int32
    counts: Int32
    rows: Int32


def distinct(outputs: Tokens, *, vocab_size: int, eos_id: int, depth: int = DEPTH) -> Documents:
    """The distinct documents ``SEP output EOS END`` of a task's outputs.

    Args:
        outputs: Token ids without end-of-sequence.
        depth: Number of additional ENDs after the last document.

    Raises:
        DraftError: An id is outside the vocabulary, or the vocabulary or the corpus is too large.
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
    """The documents marked in ``kept``, ``bool[D]``, in the same order."""
    numbers = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    starts, lengths = documents.offsets[:-1][kept], np.diff(documents.offsets)[kept]
    text, offsets = _arrange(documents.text, starts, lengths, depth)
    return Documents(text, offsets, documents.counts[kept], numbers[documents.rows])


def _check(outputs: Tokens, vocab_size: int, eos_id: int, depth: int) -> None:
    if not 0 < vocab_size <= MAX_VOCAB:
        raise DraftError(
            f"the vocabulary has {vocab_size} tokens, but an index supports 1 to {MAX_VOCAB}; "
            "correct vocab_size in the model's config.json"
        )
    if not 0 <= eos_id < vocab_size:
        raise DraftError(
            f"the end-of-sequence id is {eos_id}, but the vocabulary has {vocab_size} tokens; "
            "correct eos_token_id in the model's config.json"
        )
    require_ids(outputs, vocab_size)
    if not 2 <= depth <= MAX_DEPTH:
        raise DraftError(
            f"depth is {depth}, but grams have 2 to {MAX_DEPTH} tokens; leave depth at {DEPTH}"
        )
    size = outputs.ids.size + MARKS * len(outputs) + depth
    if size > MAX_TEXT:
        raise DraftError(
            f"the corpus has {size} tokens, but an index holds at most {MAX_TEXT}; index fewer "
            "documents"
        )


def require_ids(texts: Tokens, vocab_size: int) -> None:
    """Raise DraftError if an id is outside the vocabulary."""
    ids = texts.ids
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DraftError(
            f"corpus ids run from {ids.min()} to {ids.max()}, but the vocabulary has {vocab_size} "
            "tokens; tokenise the corpus with the target's own tokenizer"
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
    """Write ``SEP output EOS END`` for each output, and ENDs after the last output."""
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
    """Copy the documents that begin at ``starts`` one after the other."""
    for i in range(len(starts)):
        size = offsets[i + 1] - offsets[i]
        text[offsets[i] : offsets[i + 1]] = source[starts[i] : starts[i] + size]


def by_gain(documents: Documents) -> Int64:
    """Document numbers by falling expected gain per token; deterministic.

    The sum of the diminishing gains is maximised greedily, by falling thresholds (Badanidiyuru &
    Vondrak 2014).
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
    """Rank documents: each sweep takes those that reach a threshold, then halves it."""
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
    """The expected gain per token of a document with these grams.

    ``held`` has the count of each gram in the documents taken so far.
    """
    gain = 0.0
    for gram in grams:
        gain += elsewhere[gram] / (1.0 + held[gram]) ** 2
    return gain / len(grams)


def check_cap(max_bytes: int | None, depth: int = DEPTH) -> None:
    """Raise DraftError if even an index without documents exceeds ``max_bytes``."""
    smallest = CorpusIndex.empty("", 1, depth).nbytes
    if max_bytes is not None and max_bytes < smallest:
        raise DraftError(
            f"max_bytes is {max_bytes}, but an index without documents takes {smallest}; "
            "raise max_bytes"
        )


def index_documents(
    documents: Documents,
    *,
    fingerprint: str,
    vocab_size: int,
    depth: int = DEPTH,
    max_bytes: int | None = None,
    sort: Callable[[Documents], Parts] | None = None,
    pruned: Callable[[int], None] = lambda times: None,
) -> tuple[CorpusIndex, Documents]:
    """Index distinct documents, as many as fit into ``max_bytes`` of arrays.

    Memory peaks below 60 bytes per token.

    If not all documents fit, those with the highest expected gain per token are kept (`by_gain`).
    The bytes per token of one attempt determine how many documents the next attempt keeps.

    Args:
        fingerprint: The fingerprint of the tokenizer that made the ids.
        sort: Sorts a text by ``depth`` tokens in any number of parts; by default in one part, in
            this process.
        pruned: Called with the number of choices of documents so far: with 0 before the first
            choice, then after each choice.

    Returns:
        The index and the documents in it; rows of dropped documents have the number -1.

    Raises:
        DraftError: Even an index without documents does not fit.
    """

    def indexed(some: Documents) -> CorpusIndex:
        whole = some.text, some.offsets, some.counts, depth
        parts = [sort_part(*whole)] if sort is None else sort(some)
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
    documents: Documents, parts: Parts, *, fingerprint: str, vocab_size: int, depth: int = DEPTH
) -> CorpusIndex:
    """Join the sorted parts of the documents' text, in order, into an index."""
    order = np.concatenate([part[0] for part in parts])
    cumulative = np.zeros(len(order) + 1, np.int32)
    np.cumsum(np.concatenate([part[1] for part in parts]), out=cumulative[1:])
    sizes = depth, int(documents.counts.sum()), int(cumulative[-1])
    arrays = documents.text, documents.offsets, order, cumulative
    hot = hot_table(documents.text, order, cumulative, depth)
    return CorpusIndex(fingerprint, vocab_size, *sizes, *arrays, *hot)
