"""Tests the hybrid: the calls of its proposers, the n-grams' inputs, and the model's pauses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from neural_drafters import Always
from support import FakeClock, Silent
from tasc_draft import Drafts, DraftSettings, NgramProposer, Tokens, build_index
from tasc_draft.drafts import CORPUS, NEURAL
from tasc_draft.labels import LabelTrie
from tasc_engine.drafting.neural.hybrid import LONGEST, TRIAL, HybridProposer, TwoArmedBandit
from tasc_engine.drafting.safe_proposer import max_draft_tokens

ROW, ONE = np.zeros(1, np.int32), np.ones(1, np.int32)
SURE = 0.9


@dataclass
class Fixed(Silent):
    """Always drafts one token of a row with a budget; as a host it records its inputs.

    The probability is the same for all rows, or differs by row.
    """

    token: int
    probs: float | list[float]
    vocab_size: int = 100
    asked: list[list[int]] = field(default_factory=list)
    external: list[Drafts | None] = field(default_factory=list)

    def propose(
        self, rows: np.ndarray, budget: np.ndarray, min_probs: object = None,
        external: Drafts | None = None,
    ) -> Drafts:  # fmt: skip
        self.asked.append(budget.tolist())
        self.external.append(external)
        n = int((budget > 0).sum())
        offsets = np.concatenate((ROW, np.cumsum(budget > 0, dtype=np.int32)))
        return Drafts(
            np.full(n, self.token, np.int32), np.full(n, -1, np.int32), np.ones(n, np.int16),
            offsets, np.log(np.resize(np.float32(self.probs), n)), np.full(n, CORPUS, np.int8),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("probs", "budget", "of_the_model", "handed"),
    [
        (0.4, [5, 0, 7], [[5, 0, 7]], [2, 2]),
        ([0.95, 0.4, 0.9], [5, 6, 7], [[0, 6, 0]], [2]),
        (0.95, [1], [], None),  # a sure row
    ],
)
def test_drafter_runs_for_unsure_rows_and_its_tree_is_merged(
    probs, budget, of_the_model, handed
) -> None:
    ngram, neural = Fixed(1, probs), Fixed(2, 0.4)
    hybrid = HybridProposer(ngram, neural, sure=SURE, arms=Always())
    drafts = hybrid.propose(np.arange(len(budget), dtype=np.int32), np.array(budget, np.int32))
    assert drafts.tokens.tolist() == [1 for most in budget if most]
    how_sure = [int(most > 0) for most in budget]
    assert (ngram.asked, neural.asked) == ([how_sure, budget], of_the_model)
    external = [
        None if external is None else external.tokens.tolist() for external in ngram.external
    ]
    assert external == [None, handed]


def ngrams(outputs: Sequence[Sequence[int]]) -> NgramProposer:
    settings = DraftSettings(min_prob=0.0, recent_tokens=0, num_speculative_tokens=24)
    index = build_index(Tokens.of(outputs), fingerprint="f" * 32, vocab_size=12, eos_id=0)
    return NgramProposer(
        settings, rows=2, capacity=32, vocab_size=12, eos_ids=[0], index=index, branching=True
    )


def test_n_grams_continue_after_a_token_of_the_drafter() -> None:
    hybrid = HybridProposer(
        ngrams([[2, 3, 4], [5, 2, 3]] * 9), Fixed(7, 0.99), sure=1.0, arms=Always()
    )
    hybrid.start(0, np.array([1], np.int32))
    drafts = hybrid.propose(ROW, 24 * ONE)
    assert {2, 7} <= set(drafts.tokens.tolist())
    for token, source in zip(drafts.tokens.tolist(), drafts.source.tolist(), strict=True):
        assert (token == 7) == (source == NEURAL)


def test_drafter_does_not_run_for_known_labels() -> None:
    ngram, neural = ngrams([[1, 2, 3, 5]] * 9), Fixed(4, 0.9)
    labels = LabelTrie.of([(1, 2, 3, 5, 0), (1, 2, 3, 6, 0), (4, 7, 8, 0), (4, 7, 9, 0)])
    rows, budget = np.arange(2, dtype=np.int32), np.full(2, 8, np.int32)
    for sure, at_first in ((0.3, 0), (1.0, 8)):
        hybrid = HybridProposer(ngram, neural, sure=sure, arms=Always())
        hybrid.start(0, np.array([11], np.int32), labels)
        hybrid.start(1, np.array([11], np.int32))
        hybrid.propose(rows, budget)
        assert sum(of_labels for of_labels, _ in neural.asked) == at_first
        assert neural.asked == ([[8, 8]] if at_first else [])
        hybrid.finish(0)
        hybrid.finish(1)


@pytest.mark.parametrize("way", ["always", "bandit", "default"])
def test_drafter_is_skipped_in_steps_of_the_cheap_arm(way: str) -> None:
    clock, neural = FakeClock(), Fixed(2, 0.4)
    arms = {"always": {"arms": Always()}, "bandit": {"arms": TwoArmedBandit(clock)}}
    hybrid = HybridProposer(Fixed(1, 0.4), neural, **arms.get(way, {}))
    hybrid.start(0, ROW)
    for _ in range(4 * TRIAL):
        hybrid.propose(ROW, ONE)
        hybrid.observe(0, np.array([2], np.int32))
        clock.now += 1.0
    hybrid.finish(0)
    expected = {"always": [4 * TRIAL], "bandit": [3 * TRIAL]}
    assert len(neural.asked) in expected.get(way, range(TRIAL, 4 * TRIAL))


class Arms:
    """A bandit with a clock, and the list of its costly steps."""

    def __init__(self) -> None:
        self.clock, self.taken = FakeClock(), list[bool]()
        self.bandit = TwoArmedBandit(self.clock)

    def step(self, costly_s: float, costly_tokens: int = 1, tokens: int = 1) -> int:
        """A cheap step takes one second; returns the tokens."""
        self.taken.append(self.bandit.begin())
        costly = self.taken[-1]
        self.clock.now += costly_s if costly else 1.0
        self.bandit.emitted(costly_tokens if costly else tokens)
        return costly_tokens if costly else tokens


def test_bandit_follows_a_changed_machine() -> None:
    arms = Arms()
    for step in range(12_000):
        arms.step(0.5 if step < 3000 else 9.0)
    assert arms.taken[2500:3000].count(True) > 400
    assert arms.taken[-1000:].count(False) > 900


@pytest.mark.parametrize("costly_s", [0.5, 1.0, 2.5, 3.0])
@pytest.mark.parametrize("answers", [1, 2000])
def test_bandit_prefers_the_faster_arm(costly_s: float, answers: int) -> None:
    """Short answers of 8 tokens are timed as a whole: 2 costly steps or 4 cheap ones."""
    arms = Arms()
    for _ in range(answers):
        left = 16_000 // answers
        while left > 0:
            left -= arms.step(costly_s, min(4, left), min(2, left))
        arms.bandit.idle()
        arms.clock.now += 100.0
    assert arms.taken[-LONGEST:].count(costly_s < 2.0) >= LONGEST - 2 * TRIAL
    assert {True, False} == set(arms.taken)  # both were tried


def test_answers_of_one_step_count_as_trials() -> None:
    arms = Arms()
    for _ in range(4 * TRIAL):
        arms.step(3.0)
        arms.bandit.idle()
    assert not all(arms.taken)


def test_hybrid_max_tokens_is_the_larger_of_the_two_limits() -> None:
    small, large = Fixed(1, 0.4), Fixed(1, 0.4)
    large.max_tokens = 9  # type: ignore[attr-defined]
    for parts in ((small, large), (large, small)):
        assert max_draft_tokens(HybridProposer(*parts)) == 9
    assert max_draft_tokens(small) == small.max_depth


def test_idle_time_does_not_count_in_the_bandit() -> None:
    arms = Arms()
    for step in range(2 * TRIAL + 2):
        arms.step(1.0, costly_tokens=2)
        if step == 3:
            arms.bandit.idle()
            arms.clock.now += 1e6
    assert arms.bandit.begin()
