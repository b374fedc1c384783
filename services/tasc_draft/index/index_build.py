"""Build a task's whole draft index from token ids, in one process. It knows no text, no files."""

import numpy as np
from numpy.typing import NDArray

from tasc_draft.errors import DraftError
from tasc_draft.index.aligned_build import build_aligned
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.corpus_build import distinct, index_documents
from tasc_draft.index.corpus_documents import Documents
from tasc_draft.index.draft_index import DraftIndex
from tasc_draft.index.inputs_build import build_inputs
from tasc_draft.tokens import Int32, Tokens


def build_index(
    outputs: Tokens,
    prompts: Tokens | None = None,
    *,
    fingerprint: str,
    vocab_size: int,
    eos_id: int,
    word_starts: NDArray[np.bool_] | None = None,
    canonical: Int32 | None = None,
    max_bytes: int | None = None,
) -> DraftIndex:
    """Index a task's outputs and, where they are given, its prompts.

    Args:
        outputs: Token ids without end-of-sequence, one text a row.
        prompts: Of the same rows, whole and rendered, as the target will see them.
        fingerprint: Of the tokenizer that made the ids.
        eos_id: Written behind each output.
        word_starts: ``bool[vocab_size + 1]`` whether a token begins a word; without it nothing is
            aligned.
        canonical: ``int32[vocab_size + 1]`` the id of the same text without a blank in front.
        max_bytes: Most bytes of the corpus part; outputs of least expected gain are left out.

    Raises:
        DraftError: An id is outside the vocabulary, rows do not pair up, or a size is out of range.
    """
    documents = distinct(outputs, vocab_size=vocab_size, eos_id=eos_id)
    corpus, kept = index_documents(
        documents, fingerprint=fingerprint, vocab_size=vocab_size, max_bytes=max_bytes
    )
    return with_prompts(
        corpus,
        kept,
        outputs,
        prompts,
        eos_id=eos_id,
        word_starts=word_starts,
        canonical=canonical,
    )


def with_prompts(
    corpus: CorpusIndex,
    documents: Documents,
    outputs: Tokens,
    prompts: Tokens | None,
    *,
    eos_id: int,
    word_starts: NDArray[np.bool_] | None,
    canonical: Int32 | None = None,
) -> DraftIndex:
    """A corpus index with what the prompts of its rows tell; see `build_index`."""
    if prompts is None or not len(prompts):
        return DraftIndex(corpus, canonical=canonical)
    if not len(prompts) == len(outputs) == len(documents.rows):
        raise DraftError(
            f"there are {len(prompts)} prompts for {len(outputs)} outputs; give one for each"
        )
    held = np.flatnonzero(documents.rows >= 0)
    if len(held) < len(prompts):
        prompts, outputs = prompts.take(held), outputs.take(held)
    inputs = build_inputs(prompts, outputs, documents.rows[held])
    aligned = word_starts is not None and build_aligned(
        prompts, outputs, word_starts=word_starts, vocab_size=corpus.vocab_size, eos_id=eos_id
    )
    if not aligned:
        return DraftIndex(corpus, inputs, canonical=canonical)
    return DraftIndex(corpus, inputs, aligned, word_starts, canonical)
