"""Combines the n-gram mixture with a neural drafter, which runs where the n-grams are unsure.

The drafter's tree is merged into the n-grams' tree (`tasc_draft.mixture.external_tree`): each tree
extends the other's paths, and the weights of both are learnt. Whether the drafter is worth its time
depends on machine, target and load. A two-armed bandit decides this: it measures tokens per second
with and without the drafter, and repeats the trials from time to time.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft import Drafts, NgramProposer, Proposer
from tasc_draft.labels import LabelTrie
from tasc_engine.drafting.safe_proposer import SafeProposer, max_draft_tokens
from tasc_engine.layout import Int32
from tasc_engine.model.hidden_states import HiddenStateRequest

TRIAL = 16  # steps of a trial of one arm
LONGEST = 2048  # maximum steps between two trials of the slower arm
_FADE = 0.5  # weight of the rates of earlier trials


class TwoArmedBandit:
    """Decides before each step whether to use the costly arm (True) or the cheap one.

    Args:
        clock: Returns seconds since an arbitrary time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rates: dict[bool, float] = {}
        self._costly, self._best = True, True
        self._tries, self._left, self._stretch = True, TRIAL, TRIAL
        self._began: float | None = None
        self._tokens, self._seconds = 0, 0.0

    def begin(self) -> bool:
        """Ends the last step and begins a new one; returns whether to use the costly arm in it."""
        self._end()
        self._began = self._clock()
        return self._costly

    def emitted(self, tokens: int) -> None:
        """Counts tokens that steps emitted."""
        self._tokens += tokens

    def idle(self) -> None:
        """Ends the step without beginning the next, because no request is left."""
        self._end()
        self._began = None

    def _end(self) -> None:
        if self._began is None:
            return
        self._seconds += self._clock() - self._began
        self._left -= 1
        if self._left == 0:
            self._choose_arm()

    def _choose_arm(self) -> None:
        """Chooses the next arm after a run of steps with one arm."""
        rate = self._tokens / max(self._seconds, 1e-9)
        before = self._rates.get(self._costly, rate)
        self._rates[self._costly] = _FADE * before + (1 - _FADE) * rate
        self._tokens, self._seconds = 0, 0.0
        if not self._tries or len(self._rates) < 2:
            self._costly, self._left, self._tries = not self._costly, TRIAL, True
            return
        best = self._rates[True] >= self._rates[False]
        self._stretch = min(2 * self._stretch, LONGEST) if best == self._best else TRIAL
        self._costly, self._left, self._tries = best, self._stretch, False
        self._best = best


class HybridProposer:
    """Combines two proposers; see `tasc_draft.Proposer`.

    Args:
        ngram: The cheap proposer. It runs in every step, and twice in a step that may run the
            model.
        neural: Runs in steps that ``arms`` selects, for rows where the likeliest token of the
            n-grams has a probability below ``sure``. It does not run for rows whose labels leave no
            draft token that can save a forward.
        arms: Selects the steps; None for a `TwoArmedBandit`, which maximises tokens per second.

    Raises:
        ValueError: ``sure`` is not a probability.
    """

    def __init__(
        self,
        ngram: NgramProposer,
        neural: Proposer,
        sure: float = 0.9,
        arms: TwoArmedBandit | None = None,
    ) -> None:
        if not 0.0 <= sure <= 1.0:
            raise ValueError(f"sure is {sure}; it must lie between 0 and 1")
        # A failure of the model, or its time limit, must not affect the drafts of n-grams.
        self._ngram, self._neural = ngram, SafeProposer(neural, ngram.vocab_size)
        self._sure = sure
        self._arms = arms or TwoArmedBandit()
        self._in_use, self._labelled = set[int](), set[int]()

    @property
    def hidden_state_request(self) -> HiddenStateRequest:
        """The hidden states that the neural proposer needs now; none after it is switched off."""
        return self._neural.hidden_state_request

    def new_failures(self) -> int:
        """Number of failures of the neural proposer since the last call."""
        return self._neural.new_failures()

    @property
    def max_depth(self) -> int:
        return self._ngram.max_depth

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a row's tree, which may hold tokens of both: the larger maximum."""
        return max(max_draft_tokens(self._ngram), max_draft_tokens(self._neural))

    def start(self, row: int, prompt: Int32, labels: LabelTrie | None = None) -> None:
        self._in_use.add(row)
        if labels is not None:
            self._labelled.add(row)
        self._ngram.start(row, prompt, labels)
        self._neural.start(row, prompt)

    def prepare(
        self, upcoming: Sequence[tuple[Int32, LabelTrie | None]], may_go_on: Callable[[], bool]
    ) -> None:
        """See `NgramProposer.prepare`."""
        self._ngram.prepare(upcoming, may_go_on)

    def observe(self, row: int, tokens: Int32, hidden: Any = None) -> None:
        self._arms.emitted(len(tokens))
        self._ngram.observe(row, tokens)
        self._neural.observe(row, tokens, hidden)

    def finish(self, row: int) -> None:
        self._in_use.discard(row)
        self._labelled.discard(row)
        if not self._in_use:
            self._arms.idle()
        self._ngram.finish(row)
        self._neural.finish(row)

    def propose(
        self, rows: Int32, budget: Int32, min_probs: NDArray[np.float32] | None = None
    ) -> Drafts:
        if not self._arms.begin():
            return self._ngram.propose(rows, budget, min_probs)
        unsure = self._best(rows, budget) < self._sure
        asked = np.where(unsure, budget, 0).astype(np.int32)
        external = self._neural.propose(rows, asked) if asked.any() else None
        return self._ngram.propose(rows, budget, min_probs, external)

    def _best(self, rows: Int32, budget: Int32) -> NDArray[np.float32]:
        """Probability of the n-grams' likeliest first token of each row; 0 without a draft."""
        first_budget = np.minimum(budget, 1)
        if self._labelled:  # a row with labels also spends budget on forced tokens
            first_budget = np.where(np.isin(rows, list(self._labelled)), budget, first_budget)
        first = self._ngram.propose(rows, first_budget)
        best = np.zeros(len(rows), np.float32)
        drafted = np.diff(first.offsets) > 0
        best[drafted] = np.exp(first.logp[first.offsets[:-1][drafted]])
        return best
