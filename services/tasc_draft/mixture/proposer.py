"""The n-gram proposer: drafts for rows from a task's index, by a mixture chosen by name.

Token ids only: no text, no target model. It never decides what the answer is; it only guesses what
the target will say.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.drafts import Drafts
from tasc_draft.errors import DraftError
from tasc_draft.index.aligned import words
from tasc_draft.index.draft_index import DraftIndex
from tasc_draft.index.weights import Weights
from tasc_draft.mixture import occurrences as neighbours
from tasc_draft.mixture import recent, teaching, tree
from tasc_draft.mixture.candidates import NONE
from tasc_draft.mixture.external_tree import NOBODY, ExternalTree, guest_of
from tasc_draft.mixture.integrity import check_rows
from tasc_draft.mixture.memory import Memory
from tasc_draft.mixture.row_state import begin_again
from tasc_draft.settings import DraftSettings
from tasc_draft.tokens import Int32


class NgramProposer:
    """Proposer of the mixture that ``settings.mixture`` names.

    ``tasc`` and ``trie`` are the published rules (`rules`); ``mixed`` weighs the evidence of all
    sources by weights that it goes on learning (`evidence`, `scoring`).

    Raises:
        DraftError: A size is below 1, or the index is sorted by too few tokens.

    Args:
        rows: Number of rows; row numbers are below it.
        capacity: Most tokens of one row, prompt and answer together.
        vocab_size: Ids the target can emit are below it.
        eos_ids: A path ends with any of them.
        index: What is drafted from; ``set_index`` replaces it.
        branching: Drafts are trees; else chains, trees whose nodes have one child.
        nodes: Most draft tokens of one step, all rows together; by default as many as ``rows``
            drafts of ``settings.num_speculative_tokens`` have.

    All memory of rows and steps is taken here (`nbytes`); an index brings a few bytes an id and a
    corpus row more. Not thread-safe; one engine owns one proposer.
    """

    def __init__(
        self,
        settings: DraftSettings,
        *,
        rows: int,
        capacity: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        index: DraftIndex,
        branching: bool = True,
        nodes: int | None = None,
    ) -> None:
        self.settings = settings
        self._budget = rows * settings.num_speculative_tokens if nodes is None else nodes
        self._memory = Memory(
            settings, rows, capacity, vocab_size, eos_ids, index, self._budget, branching
        )
        self._lengths = self._memory.rows["length"]
        self._least = np.zeros(self._budget, np.float32)
        self._open(index)
        self._warm_up()

    @property
    def max_depth(self) -> int:
        return self.settings.num_speculative_tokens

    @property
    def nbytes(self) -> int:
        """Memory of the rows and the step, in bytes; the index's is its own."""
        return self._memory.nbytes

    @property
    def weights(self) -> Weights:
        """The weights as learnt so far."""
        return Weights(self._learnt.weights.copy())

    @property
    def moved(self) -> NDArray[np.float32]:
        """``float32[CELLS]`` how much each weight was learnt: its summed squared gradients."""
        return self._learnt.squares - 1.0

    def start(self, row: int, prompt: Int32) -> None:
        it, text = self._memory.rows[row], self._memory.texts[row]
        if it["length"]:
            raise DraftError(f"row {row} is in use; finish it before it is started again")
        self._require_fit(prompt, len(prompt))
        text[: len(prompt)] = prompt
        text[len(prompt)] = self.index.corpus.vocab_size
        it["begin"] = len(prompt)
        it["length"] = len(prompt) + 1
        it["caught"] = it["num_contexts"] = it["begun"] = 0
        it["root"] = NONE
        self._look_at(row, prompt)

    def propose(
        self,
        rows: Int32,
        budget: Int32,
        least: NDArray[np.float32] | None = None,
        guest: Drafts | None = None,
    ) -> Drafts:
        """See `tasc_draft.Proposer`.

        Args:
            guest: What somebody else drafts for the same rows; both become one tree (`guests`).
                Where it drafted, a row has up to ``budget[i]`` tokens, and no least probability
                of its own.

        Raises:
            DraftError: More rows than there are, or the guest has other rows, or no trees of ids.
        """
        if len(rows) > len(self._lengths):
            raise DraftError(
                f"{len(rows)} rows are drafted for, there are {len(self._lengths)}; name each once"
            )
        limits = budget.copy()
        least = self._least if least is None else least[: self._budget]
        linked = NOBODY if guest is None else self._linked(guest, len(rows))
        n = tree.grow(self._state, rows, limits, least, linked)
        return self._memory.drafts(n, len(rows))

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        lengths, texts = self._lengths, self._memory.texts
        begin = lengths[row]
        end = begin + len(tokens)
        if end > texts.shape[1]:
            raise DraftError(
                f"row {row} has {begin - 1} tokens, {len(tokens)} more exceed its capacity of "
                f"{texts.shape[1] - 1}; make the proposer with a greater one"
            )
        texts[row, begin:end] = tokens
        lengths[row] = end

    def finish(self, row: int) -> None:
        recent.release(self._state, row)

    def teach(self, prompt: Int32, answer: Int32, rate: float) -> None:
        """Learn from one answer, ``int32[n]`` with its end-of-sequence, on row 0.

        The row must be free, and the index must not hold the answer: what is drafted from text
        that it knows by heart teaches nothing about new text.
        """
        self._require_fit(answer, len(prompt) + len(answer))
        self.start(0, prompt)
        teaching.teach(self._state, 0, answer, rate)
        self.finish(0)

    def set_index(self, index: DraftIndex) -> None:
        """Replace the index between two steps; rows go on where they are.

        What was learnt from the target's answers goes with the old index, and so do neighbours.

        Raises:
            DraftError: The index has another vocabulary size.
        """
        if index.corpus.vocab_size != self.index.corpus.vocab_size:
            raise DraftError(
                f"the new index has a vocabulary of {index.corpus.vocab_size}, the old one of "
                f"{self.index.corpus.vocab_size}; build it with the target's tokenizer"
            )
        self._open(index)
        for row in np.flatnonzero(self._lengths):
            neighbours.part(self._state, row)
            prompt = self._memory.texts[row, : self._memory.rows[row]["begin"]]
            self._look_at(int(row), prompt)
            begin_again(self._state, row)

    def check_integrity(self) -> None:
        """Raise AssertionError unless what is kept for each row is what its text says."""
        check_rows(self._state, self._memory, self.index)

    def _linked(self, guest: Drafts, rows: int) -> ExternalTree:
        if len(guest.offsets) != rows + 1:
            raise DraftError(
                f"the guest drafted for {len(guest.offsets) - 1} rows, {rows} are drafted for; ask "
                "it for the same ones"
            )
        sizes = np.diff(guest.offsets)
        nodes = len(guest.tokens)
        whole = (
            guest.offsets[0] == 0 and int(guest.offsets[-1]) == nodes
            and len(guest.parents) == len(guest.logp) == nodes and not (sizes < 0).any()
        )  # fmt: skip
        place = np.arange(nodes) - np.repeat(guest.offsets[:-1], sizes) if whole else sizes
        if not whole or ((guest.parents < -1) | (guest.parents >= place)).any():
            raise DraftError("the guest's drafts are no trees, parents in front of their children")
        if not np.isfinite(guest.logp).all():
            raise DraftError("the guest has a token whose log-probability is no number")
        self._require_ids(guest.tokens)
        return guest_of(guest)

    def _open(self, index: DraftIndex) -> None:
        """Take an index in, whole or not at all."""
        learnt = self._memory.learnt(index)
        search = self._memory.search(index)
        state = self._memory.state(index, learnt)
        self.index, self._learnt, self._search, self._state = index, learnt, search, state

    def _require_fit(self, tokens: Int32, length: int) -> None:
        """Compiled code checks no bounds, so what comes from outside is checked here."""
        capacity = self._memory.texts.shape[1] - 1
        if length > capacity:
            raise DraftError(
                f"{length} tokens exceed a row's capacity of {capacity}; make the proposer with a "
                "greater one"
            )
        self._require_ids(tokens)

    def _require_ids(self, tokens: Int32) -> None:
        ids = len(self._memory.is_eos)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < ids:
            raise DraftError(
                f"ids run from {tokens.min()} to {tokens.max()}, the vocabulary has {ids}; "
                "tokenise with the target's own tokenizer"
            )

    def _look_at(self, row: int, prompt: Int32) -> None:
        """Find the prompt's neighbours and words."""
        memory = self._memory
        if self._search:
            neighbours.meet(self._state, self.index.corpus.offsets, *self._search, row, prompt)
        if self.index.aligned:
            memory.rows[row]["words"] = words(
                prompt, self.index.word_starts, memory.words.hashes[row], memory.words.lasts[row]
            )

    def _warm_up(self) -> None:
        """Compile, or load what was compiled, before the first request instead of during it."""
        token = np.zeros(1, np.int32)
        self.start(0, token)
        self.propose(token, np.ones(1, np.int32))
        self.finish(0)  # without an answer, so that nothing is learnt or remembered
