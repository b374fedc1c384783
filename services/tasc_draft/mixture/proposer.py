"""The n-gram proposer: drafts for rows from a task's index, by a mixture of sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.drafts import DraftError, Drafts, Int32
from tasc_draft.index.draft_index import DraftIndex
from tasc_draft.index.weights import Weights
from tasc_draft.labels import LabelTrie, RowLabels
from tasc_draft.mixture import tree
from tasc_draft.mixture.external_tree import NO_TREE, ExternalTree
from tasc_draft.mixture.memory import Memory
from tasc_draft.mixture.row_state import (
    NONE,
    analyse,
    append_tokens,
    begin_row,
    catch_up,
    forget_neighbours,
    reset,
)
from tasc_draft.settings import DraftSettings

# Answers that ended without drafts become recent answers together: before the next step, or once
# this many answers or tokens are kept.
_KEPT_ANSWERS, _KEPT_TOKENS = 64, 4096


_MOST_SPARE = 32  # each lane takes eight bytes for each id of the vocabulary


@dataclass
class _Pending:
    """A lane whose row has had no draft yet: only its text has been written.

    Attributes:
        begin: Number of tokens of the prompt.
    """

    begin: int
    labels: LabelTrie | None


class NgramProposer:
    """Drafts by the mixture that ``settings.mixture`` names.

    ``tasc`` and ``trie`` are the published rules (`rules`). ``mixed`` weighs the evidence of all
    sources by weights that it keeps learning (`evidence`).

    The constructor allocates the memory of all rows and steps (`nbytes`). An index adds a few bytes
    per id and per corpus row. A proposer is not thread-safe and belongs to one engine.

    A row costs next to nothing until its first draft, when its prompt is analysed and its state is
    derived. An answer that ends before the row's first draft still becomes a recent answer.

    The state of a row is in a *lane*. With ``spare`` lanes, `prepare` takes work out of the time
    between two forwards: it analyses prompts before their rows begin, and adds the answers of ended
    rows to the recent answers.

    Attributes:
        index: The index in use.
        memory: The arrays that compiled code works on, for tests.
        state: The input of compiled code: the arrays of ``memory`` and of the index.
        learnt: The weights as learnt so far; compiled code updates them in place.

    Args:
        rows: Number of rows.
        capacity: Maximum number of tokens of one row, prompt and answer together.
        vocab_size: Vocabulary size of the target, which emits only ids below it.
        eos_ids: Ids that end a path.
        index: The index to draft from; ``set_index`` replaces it.
        branching: Whether drafts are trees; otherwise they are chains.
        nodes: Maximum number of draft tokens of one step for all rows together; by default ``rows``
            times ``settings.num_speculative_tokens``.
        spare: Number of additional lanes, see `spare_lanes`; if it is not 0, call `prepare` in each
            step.

    Raises:
        DraftError: The index's depth is too small for a row's contexts; see `Memory.state`.
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
        spare: int = 0,
    ) -> None:
        self.settings, self.vocab_size = settings, vocab_size
        self._budget = rows * settings.num_speculative_tokens if nodes is None else nodes
        self.memory = Memory(
            settings, rows + spare, capacity, vocab_size, eos_ids, index, self._budget, branching
        )
        self._lane_of = np.full(rows + 1, NONE, np.int32)  # by row; the last entry is of no row
        self._free, self._spare = set(range(rows + spare)), spare
        self._ended = list[int]()  # lanes of ended rows that `prepare` will free
        self._ahead = dict[int, tuple[Int32, int]]()  # prompt and lane, by the prompt's identity
        self._lengths = self.memory.rows["length"]  # 0 for a lane that is free or pending
        self._ends = np.zeros(rows + spare, np.int32)  # tokens of the text of each lane in use
        self._min_probs = np.zeros(self._budget, np.float32)
        self._labels = RowLabels()
        self._pending = dict[int, _Pending]()
        self._undrafted, self._undrafted_tokens = list[Int32](), 0
        self._open(index)
        self._warm_up()

    @staticmethod
    def spare_lanes(rows: int) -> int:
        """Number of spare lanes for a proposer that works ahead for this many rows."""
        return min(rows, _MOST_SPARE)

    @property
    def max_depth(self) -> int:
        return self.settings.num_speculative_tokens

    @property
    def nbytes(self) -> int:
        """Memory of rows and steps, in bytes; the index has its own ``nbytes``."""
        return self.memory.nbytes

    @property
    def weights(self) -> Weights:
        """A copy of the weights as learnt so far."""
        return Weights(self.learnt.weights.copy())

    @property
    def moved(self) -> NDArray[np.float32]:
        """``float32[CELLS]``: the summed squared gradients of each weight."""
        return self.learnt.squares - 1.0

    def start(self, row: int, prompt: Int32, labels: LabelTrie | None = None) -> None:
        """See `tasc_draft.Proposer`; ``labels`` are those that `prepare` got for this prompt."""
        if self._lane_of[row] != NONE:
            raise DraftError(f"row {row} is in use; finish the row before starting it again")
        _, lane = self._ahead.pop(id(prompt), (prompt, NONE))
        if lane == NONE:
            self._require(prompt)
            lane = self._free_lane(row)
            self._pending[lane] = self._written(lane, prompt, labels)
        self._lane_of[row] = lane

    def prepare(
        self,
        upcoming: Sequence[tuple[Int32, LabelTrie | None]],
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Does work ahead; call it in each step, while the target's forward runs.

        Adds ended answers to the recent answers, and analyses prompts. `start` recognises a prompt
        by the identity of its array. Only half of the spare lanes hold prompts, since rows end in
        the meantime.

        Args:
            upcoming: Prompts and labels of the next rows, in the order in which they will begin.
                Prompts that were analysed and are not among them are dropped.
            may_go_on: Asked before each prompt; False leaves it and the following prompts for
                later.
        """
        self._settle()
        if self._undrafted:
            self._remember_undrafted()
        wanted = {id(prompt) for prompt, _ in upcoming}
        for key in [key for key in self._ahead if key not in wanted]:
            self._release(self._ahead.pop(key)[1])
        for prompt, labels in upcoming:
            if id(prompt) in self._ahead:
                continue
            if len(self._ahead) >= self._spare // 2 or not may_go_on():
                return
            self._require(prompt)
            lane = self._free.pop()
            self._ahead[id(prompt)] = prompt, lane
            self._begin(lane, self._written(lane, prompt, labels))
            catch_up(self.state, lane)

    def propose(
        self,
        rows: Int32,
        budget: Int32,
        min_probs: NDArray[np.float32] | None = None,
        external: Drafts | None = None,
    ) -> Drafts:
        """See `tasc_draft.Proposer`.

        Args:
            external: Another proposer's drafts for the same rows, trees of ids with parents before
                their children. Both proposers' drafts become one tree (`external_tree`). A row with
                an external draft gets up to ``budget[i]`` tokens, regardless of
                ``settings.min_prob``.

        Raises:
            DraftError: The batch has more rows than the proposer, or ``external`` lacks a
                log-probability for a token or has one that is not finite.
        """
        if len(rows) > (most := len(self._lane_of) - 1):
            raise DraftError(
                f"the batch has {len(rows)} rows, but the proposer has {most}; name each row once"
            )
        lanes = self._lane_of[rows]
        limits = budget.copy()
        min_probs = self._min_probs if min_probs is None else min_probs[: self._budget]
        linked = NO_TREE if external is None else _linked(external)
        if self._undrafted:
            self._remember_undrafted()
        if self._pending and len(min_probs):
            for lane, limit in zip(lanes.tolist(), budget.tolist(), strict=True):
                if limit > 0 and lane in self._pending:
                    self._begin(lane, self._pending.pop(lane))
        n = tree.grow(self.state, lanes, limits, min_probs, linked, self._labels.forest)
        return self.memory.drafts(n, len(rows))

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        lane = int(self._lane_of[row])
        if lane == NONE:
            return
        begin = int(self._ends[lane])
        end = begin + len(tokens)
        self._require_fit(end - 1)
        self.memory.texts[lane, begin:end] = tokens
        self._ends[lane] = end
        if self._lengths[lane]:
            self._lengths[lane] = end

    def observe_rows(self, rows: Int32, tokens: Int32, offsets: Int32) -> None:
        """Appends tokens to several rows by one compiled call; ignores rows that are not in use.

        Args:
            rows: ``int32[m]``.
            tokens: ``int32[*]``, the tokens of all rows.
            offsets: ``int32[m + 1]`` where each row's tokens begin.
        """
        lanes = self._lane_of[rows]
        longest = append_tokens(self.state, self._ends, lanes, tokens, offsets)
        self._require_fit(longest - 1)

    def finish(self, row: int) -> None:
        lane, self._lane_of[row] = int(self._lane_of[row]), NONE
        if lane == NONE:
            return
        if pending := self._pending.pop(lane, None):
            self._keep_undrafted(self.memory.texts[lane, pending.begin : self._ends[lane]])
            self._free.add(lane)
        elif self._spare and self._free:
            tree.take_in(self.state, lane, self._labels.forest)  # while the row's tree is there
            self._ended.append(lane)
        else:
            self._release(lane)

    def teach(self, prompt: Int32, answer: Int32, rate: float) -> None:
        """Learn from one answer, ``int32[n]`` with its end-of-sequence, on row 0.

        The row must be free. The index must not contain the answer, because the weights would
        otherwise be learnt for text that the index already has.
        """
        self._require_fit(len(prompt) + len(answer))
        self._require_ids(answer)
        self.start(0, prompt)
        lane = int(self._lane_of[0])
        self._begin(lane, self._pending.pop(lane))
        tree.teach(self.state, lane, answer, rate, self._labels.forest)
        self.finish(0)

    def set_index(self, index: DraftIndex) -> None:
        """Replace the index between two steps; running rows continue.

        The weights learnt with the old index are dropped. Neighbours are searched for again.

        Raises:
            DraftError: The index has another vocabulary size.
        """
        if index.corpus.vocab_size != self.index.corpus.vocab_size:
            raise DraftError(
                f"the new index has a vocabulary of {index.corpus.vocab_size}, but the old index "
                f"of {self.index.corpus.vocab_size}; build the index with the target's tokenizer"
            )
        self._settle()
        self._open(index)
        for lane in np.flatnonzero(self._lengths):
            forget_neighbours(self.state, lane)
            analyse(self.state, lane)
            reset(self.state, lane)

    def _open(self, index: DraftIndex) -> None:
        """Switch to an index, or change nothing if that fails."""
        learnt = self.memory.learnt(index)
        state = self.memory.state(index, learnt)
        self.index, self.learnt, self.state = index, learnt, state

    def _require(self, prompt: Int32) -> None:
        self._require_fit(len(prompt))
        self._require_ids(prompt)

    def _require_fit(self, length: int) -> None:
        capacity = self.memory.texts.shape[1] - 1
        if length > capacity:
            raise DraftError(
                f"a row's {length} tokens exceed its capacity of {capacity}; create the proposer "
                "with a larger capacity"
            )

    def _require_ids(self, tokens: Int32) -> None:
        """Checks ids, because compiled code checks no bounds."""
        ids = len(self.memory.is_eos)
        if len(tokens) and tokens.view(np.uint32).max() >= ids:  # unsigned finds negative ids, too
            raise DraftError(
                f"ids run from {tokens.min()} to {tokens.max()}, but the vocabulary has {ids} "
                "tokens; tokenise with the target's own tokenizer"
            )

    def _free_lane(self, row: int) -> int:
        """Takes a free lane for a row, if possible the lane with the row's own number."""
        if not self._free:  # at most half of the spare lanes hold prompts
            self._settle()
        lane = row if row in self._free else next(iter(self._free))
        self._free.remove(lane)
        return lane

    def _settle(self) -> None:
        """Adds the answers of ended rows to the recent answers, and frees the lanes."""
        for lane in self._ended:
            self._release(lane)
        self._ended.clear()

    def _release(self, lane: int) -> None:
        tree.release(self.state, lane, self._labels.forest)
        self._labels.finish(lane)
        self._free.add(lane)

    def _written(self, lane: int, prompt: Int32, labels: LabelTrie | None) -> _Pending:
        begin, text = len(prompt), self.memory.texts[lane]
        text[:begin] = prompt
        text[begin] = self.index.corpus.vocab_size
        self._ends[lane] = begin + 1
        return _Pending(begin, labels)

    def _begin(self, lane: int, pending: _Pending) -> None:
        """Prepare a row for drafts, before the first step in which it may get one."""
        label = self._labels.start(lane, pending.labels)
        begin_row(self.state, lane, pending.begin, self._ends[lane], label)

    def _keep_undrafted(self, text: Int32) -> None:
        """Keep an answer without drafts, preceded by SEP, to add several answers at once later."""
        if 2 * (len(text) + 1) > self.memory.recent.tokens.shape[1]:
            return  # too long for the recent answers
        self._undrafted.append(text.copy())
        self._undrafted_tokens += len(text)
        if len(self._undrafted) >= _KEPT_ANSWERS or self._undrafted_tokens >= _KEPT_TOKENS:
            self._remember_undrafted()

    def _remember_undrafted(self) -> None:
        offsets = np.cumsum([0, *map(len, self._undrafted)])
        tree.remember_all(self.state, np.concatenate(self._undrafted), offsets)
        self._undrafted.clear()
        self._undrafted_tokens = 0

    def _warm_up(self) -> None:
        """Compile or load compiled code now instead of during the first request."""
        token = np.zeros(1, np.int32)
        self.start(0, token)
        self.propose(token, np.ones(1, np.int32))
        self.observe_rows(token, token[:0], np.zeros(2, np.int32))
        self.finish(0)  # without an answer, so nothing is learnt or remembered
        tree.remember_all(self.state, token, np.zeros(1, np.int64))


def _linked(drafts: Drafts) -> ExternalTree:
    if len(drafts.logp) != len(drafts.tokens) or not np.isfinite(drafts.logp).all():
        raise DraftError("the external drafts lack log-probabilities, or some are not finite")
    return ExternalTree.of(drafts)
