"""TASC-spec: chain drafts from a corpus n-gram model mixed with a prompt n-gram model.

Tsur et al. 2026, arXiv 2602.24174, section 5.2. Token ids only: no text, no target model. It never
decides what the answer is; it only guesses what the target will say.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tasc_draft import kernels
from tasc_draft.drafts import Drafts, Int32
from tasc_draft.index import CorpusIndex
from tasc_draft.settings import DraftSettings


class TascProposer:
    """Proposer of the mixture lambda * p_corpus + (1 - lambda) * p_prompt.

    Args:
        rows: Number of rows; row numbers are below it.
        capacity: Most tokens of one row, prompt and answer together.
        vocab_size: Ids the target can emit are below it.
        eos_ids: A draft ends behind any of them.
        index: The corpus n-grams; ``set_index`` replaces it.

    All memory is taken here: about ``4 * rows * (2 * capacity + vocab_size)`` bytes. Not
    thread-safe; one engine owns one proposer.
    """

    def __init__(
        self,
        settings: DraftSettings,
        *,
        rows: int,
        capacity: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        index: CorpusIndex,
    ) -> None:
        limit = settings.num_speculative_tokens
        ids = max(vocab_size, index.vocab_size) + 1
        self.settings = settings
        self._vocab_size = vocab_size
        self._text = np.zeros((rows, capacity + limit), np.int32)
        self._previous = np.full((rows, capacity + limit), kernels.NONE, np.int32)
        self._last = np.full((rows, ids), kernels.NONE, np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._begins = np.zeros(rows, np.int32)
        self._matched = np.full((rows, settings.n_max), kernels.NONE, np.int32)
        self._used = np.zeros(rows, bool)
        self._is_eos = np.zeros(ids, bool)
        self._is_eos[list(eos_ids)] = True
        self._scratch = (
            np.zeros(settings.n_max, np.int32),
            np.zeros(kernels.MAX_OCCURRENCES, np.int32),
            np.zeros(kernels.MAX_OCCURRENCES, np.int32),
        )
        self._out = _empty_drafts(rows, limit)
        self.index = index
        self._warm_up()

    @property
    def max_depth(self) -> int:
        return self.settings.num_speculative_tokens

    def start(self, row: int, prompt: Int32) -> None:
        if self._used[row]:
            raise ValueError(f"row {row} is in use; finish it before it is started again")
        self._used[row] = True
        self._lengths[row] = 0
        self._append(row, prompt, in_answer=False)
        self._begins[row] = len(prompt)
        self._match_again(row)

    def propose(self, rows: Int32, budget: Int32) -> Drafts:
        out, index = self._out, self.index
        n = kernels.draft_chains(
            rows, budget, self._text, self._previous, self._last, self._lengths, self._matched,
            index.tokens, index.counts, index.first_child, index.best_child, self._is_eos,
            self._vocab_size, self.settings.num_speculative_tokens, self.settings.corpus_weight,
            self.settings.min_prob, out.tokens, out.parents, out.depths, out.offsets, out.logp,
            out.source, *self._scratch,
        )  # fmt: skip
        return Drafts(
            out.tokens[:n],
            out.parents[:n],
            out.depths[:n],
            out.offsets[: len(rows) + 1],
            out.logp[:n],
            out.source[:n],
        )

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        self._append(row, tokens, in_answer=True)

    def finish(self, row: int) -> None:
        kernels.forget(self._last[row], self._text[row], self._lengths[row])
        self._lengths[row] = 0
        self._used[row] = False

    def set_index(self, index: CorpusIndex) -> None:
        """Replace the corpus n-grams between two steps; rows go on where they are.

        Raises:
            ValueError: The index has another vocabulary size.
        """
        if index.vocab_size != self.index.vocab_size:
            raise ValueError(
                f"the new index has a vocabulary of {index.vocab_size}, the old one of "
                f"{self.index.vocab_size}; build it with the target's tokenizer"
            )
        self.index = index
        for row in np.flatnonzero(self._used):
            self._match_again(int(row))

    def _append(self, row: int, tokens: Int32, *, in_answer: bool) -> None:
        kernels.append(
            self._text[row], self._previous[row], self._last[row], self._lengths[row], tokens,
            self._matched[row], self.index.tokens, self.index.first_child, in_answer,
        )  # fmt: skip
        self._lengths[row] += len(tokens)

    def _match_again(self, row: int) -> None:
        kernels.match_again(
            self._matched[row], self.index.tokens, self.index.first_child, self._text[row],
            self._begins[row], self._lengths[row], self.index.vocab_size,
        )  # fmt: skip

    def _warm_up(self) -> None:
        """Compile, or load what was compiled, before the first request instead of during it."""
        token = np.zeros(1, np.int32)
        self.start(0, token)
        self.propose(np.zeros(1, np.int32), np.ones(1, np.int32))
        self.observe(0, token)
        self.finish(0)


def _empty_drafts(rows: int, limit: int) -> Drafts:
    n = rows * limit
    return Drafts(
        tokens=np.zeros(n, np.int32),
        parents=np.zeros(n, np.int32),
        depths=np.zeros(n, np.int16),
        offsets=np.zeros(rows + 1, np.int32),
        logp=np.zeros(n, np.float32),
        source=np.zeros(n, np.int8),
    )
