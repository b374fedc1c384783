"""All that drafts of one task are made from, as one immutable whole. No files, no drafts.

Only the corpus is always there; a part that is None leaves its source silent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasc_draft.errors import DraftError
from tasc_draft.index.aligned import AlignedTable
from tasc_draft.index.bigrams import BigramTable
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.inputs import InputIndex
from tasc_draft.index.weights import Weights
from tasc_draft.settings import DraftSettings
from tasc_draft.tokens import Int32


@dataclass(frozen=True)
class DraftIndex:
    """The parts of a task's draft index.

    Attributes:
        corpus: Every n-gram of the outputs.
        inputs: The prompts, to find neighbours by.
        aligned: Next tokens by aligned word, for tasks that go word by word.
        word_starts: ``bool[vocab_size + 1]`` whether a token begins a word; goes with ``aligned``.
        canonical: ``int32[vocab_size + 1]`` the id of the same text without a blank in front; a
            prompt's tokens are found again in the answer whether a blank is in front or not.
        bigrams: The target's own continuations of each token.
        weights: Learnt on held-out rows; None stands for the ones to begin with.
        settings: Chosen for the task on held-out rows; None leaves them to the task's record.
    """

    corpus: CorpusIndex
    inputs: InputIndex | None = None
    aligned: AlignedTable | None = None
    word_starts: NDArray[np.bool_] | None = None
    canonical: Int32 | None = None
    bigrams: BigramTable | None = None
    weights: Weights | None = None
    settings: DraftSettings | None = None

    @classmethod
    def empty(cls, fingerprint: str, vocab_size: int) -> "DraftIndex":
        """An index of no documents: drafts come from prompts only."""
        return cls(CorpusIndex.empty(fingerprint, vocab_size))

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer that made the ids."""
        return self.corpus.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def nbytes(self) -> int:
        parts = (self.corpus, self.inputs, self.aligned, self.bigrams, self.weights)
        arrays = (self.word_starts, self.canonical)
        return sum(part.nbytes for part in (*parts, *arrays) if part is not None)

    def check_integrity(self) -> None:
        """Raise DraftError unless every part is consistent and they fit together."""
        for part in (self.corpus, self.inputs, self.aligned, self.bigrams, self.weights):
            if part is not None:
                part.check_integrity()
        fit = (
            self._inputs_fit()
            and self._aligned_fits()
            and self._canonical_fits()
            and self._bigrams_fit()
        )
        if not fit:
            raise DraftError("the parts of the index do not fit together; build the index again")

    def _inputs_fit(self) -> bool:
        documents = len(self.corpus.offsets) - 1
        return self.inputs is None or bool(
            ((self.inputs.documents >= 0) & (self.inputs.documents < documents)).all()
        )

    def _aligned_fits(self) -> bool:
        if self.aligned is None:
            return True
        return (
            self.word_starts is not None
            and len(self.word_starts) == self.vocab_size + 1
            and self.aligned.vocab_size == self.vocab_size
        )

    def _canonical_fits(self) -> bool:
        twins = self.canonical
        return twins is None or (
            len(twins) == self.vocab_size + 1
            and bool(((twins >= 0) & (twins <= self.vocab_size)).all())
        )

    def _bigrams_fit(self) -> bool:
        return self.bigrams is None or (
            self.bigrams.fingerprint == self.fingerprint
            and self.bigrams.vocab_size == self.vocab_size
        )
