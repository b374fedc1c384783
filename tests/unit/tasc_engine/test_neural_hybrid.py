"""The hybrid: who is asked for what, what the n-grams are handed, when the model is left alone."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tasc_draft import Drafts, DraftSettings, NgramProposer, Tokens, build_index
from tasc_draft.drafts import CORPUS, NEURAL
from tasc_engine.drafting.neural.hybrid import (
    LONGEST,
    TRIAL,
    Always,
    HybridProposer,
    TwoArmedBandit,
)
from tasc_engine.drafting.safe_proposer import most_tokens

ROW, ONE = np.zeros(1, np.int32), np.ones(1, np.int32)
SURE = 0.9


@dataclass
class Fixed:
    """Always drafts one token of a row that has a budget; as a host it keeps what it is handed."""

    token: int
    prob: float
    max_depth: int = 1
    asked: list[list[int]] = field(default_factory=list)
    guests: list[Drafts | None] = field(default_factory=list)

    def start(self, row: int, prompt: object) -> None: ...

    def observe(self, row: int, tokens: object, hidden: object = None) -> None: ...

    def finish(self, row: int) -> None: ...

    def propose(
        self, rows: np.ndarray, budget: np.ndarray, least: object = None,
        guest: Drafts | None = None,
    ) -> Drafts:  # fmt: skip
        self.asked.append(budget.tolist())
        self.guests.append(guest)
        n = int((budget > 0).sum())
        offsets = np.concatenate((ROW, np.cumsum(budget > 0, dtype=np.int32)))
        return Drafts(
            np.full(n, self.token, np.int32), np.full(n, -1, np.int32), np.ones(n, np.int16),
            offsets, np.log(np.full(n, self.prob, np.float32)), np.full(n, CORPUS, np.int8),
        )  # fmt: skip


class Sures(Fixed):
    """Of each row another probability."""

    def __init__(self, probs: list[float]) -> None:
        super().__init__(1, 0.5)
        self.probs = probs

    def propose(self, *asked: object) -> Drafts:  # type: ignore[override]
        drafts = super().propose(*asked)
        return replace(drafts, logp=np.log(np.array(self.probs, np.float32)))


class Large(Fixed):
    max_tokens = 9

    def __init__(self) -> None:
        super().__init__(1, 0.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_the_model_says_is_handed_to_the_n_grams() -> None:
    ngram, neural = Fixed(1, 0.4), Fixed(2, 0.4)
    hybrid = HybridProposer(ngram, neural, sure=SURE, arms=Always())
    hybrid.propose(np.arange(3, dtype=np.int32), np.array([5, 0, 7], np.int32))
    assert ngram.asked == [[1, 0, 1], [5, 0, 7]]  # how sure they are, and then all
    assert neural.asked == [[5, 0, 7]]
    assert ngram.guests[0] is None
    assert ngram.guests[1] is not None
    assert ngram.guests[1].tokens.tolist() == [2, 2]


def test_of_several_rows_the_unsure_ones_are_drafted_for() -> None:
    ngram, neural = Sures([0.95, 0.4, 0.9]), Fixed(2, 0.4)
    hybrid = HybridProposer(ngram, neural, sure=SURE, arms=Always())
    hybrid.propose(np.arange(3, dtype=np.int32), np.array([5, 6, 7], np.int32))
    assert neural.asked == [[0, 6, 0]]


def test_a_sure_row_is_not_drafted_for_by_the_model() -> None:
    ngram, neural = Fixed(1, 0.95), Fixed(2, 0.4)
    hybrid = HybridProposer(ngram, neural, sure=SURE, arms=Always())
    assert hybrid.propose(ROW, ONE).tokens.tolist() == [1]
    assert neural.asked == []
    assert ngram.guests == [None, None]


def test_real_n_grams_go_on_behind_the_model_s_token() -> None:
    setting = DraftSettings(min_prob=0.0, recent_tokens=0, num_speculative_tokens=24)
    outputs = Tokens.of([[2, 3, 4], [5, 2, 3]] * 9)
    index = build_index(outputs, None, fingerprint="f" * 32, vocab_size=12, eos_id=0)
    ngram = NgramProposer(
        setting, rows=1, capacity=32, vocab_size=12, eos_ids=[0], index=index, branching=True
    )
    hybrid = HybridProposer(ngram, Fixed(7, 0.99), sure=1.0, arms=Always())
    hybrid.start(0, np.array([1], np.int32))
    drafts = hybrid.propose(ROW, 24 * ONE)
    assert {2, 7} <= set(drafts.tokens.tolist())
    for token, source in zip(drafts.tokens.tolist(), drafts.source.tolist(), strict=True):
        assert (token == 7) == (source == NEURAL)


@pytest.mark.parametrize(("always", "asked"), [(True, 4 * TRIAL), (False, 3 * TRIAL)])
def test_the_model_is_left_alone_now_and_then_unless_it_is_always_asked(
    always: bool, asked: int
) -> None:
    clock, neural = Clock(), Fixed(2, 0.4)
    hybrid = HybridProposer(
        Fixed(1, 0.4), neural, arms=Always() if always else TwoArmedBandit(clock)
    )
    hybrid.start(0, ROW)
    for _ in range(4 * TRIAL):
        hybrid.propose(ROW, ONE)
        hybrid.observe(0, np.array([2], np.int32))
        clock.now += 1.0
    hybrid.finish(0)
    assert len(neural.asked) == asked


def test_a_hybrid_by_itself_tries_both_ways() -> None:
    neural = Fixed(2, 0.4)
    hybrid = HybridProposer(Fixed(1, 0.4), neural)
    for _ in range(TRIAL + 1):
        hybrid.propose(ROW, ONE)
    assert len(neural.asked) == TRIAL


@pytest.mark.parametrize("costly_s", [0.5, 3.0])
def test_the_faster_way_is_taken_nearly_always(costly_s: float) -> None:
    clock = Clock()
    arms, taken = TwoArmedBandit(clock), []
    for _ in range(6000):
        costly = arms.begin()
        taken.append(costly)
        clock.now += costly_s if costly else 1.0
        arms.emitted(2 if costly else 1)
    wanted = costly_s < 2.0
    assert taken[-LONGEST:].count(wanted) >= LONGEST - 2 * TRIAL
    assert {True, False} == set(taken)  # both were tried


def test_it_changes_its_mind_when_the_machine_does() -> None:
    clock = Clock()
    arms, taken = TwoArmedBandit(clock), []
    for step in range(12_000):
        costly = arms.begin()
        taken.append(costly)
        clock.now += (0.5 if step < 3000 else 9.0) if costly else 1.0
        arms.emitted(1)
    assert taken[2500:3000].count(True) > 400
    assert taken[-1000:].count(False) > 900


@pytest.mark.parametrize("costly_s", [1.0, 2.5])
def test_short_answers_one_after_another_are_timed_whole(costly_s: float) -> None:
    """Of 8 tokens each: in 2 steps of the costly way, in 4 of the cheap one."""
    clock = Clock()
    arms, taken = TwoArmedBandit(clock), []
    for _ in range(2000):
        left = 8
        while left:
            costly = arms.begin()
            taken.append(costly)
            clock.now += costly_s if costly else 1.0
            tokens = min(4 if costly else 2, left)
            left -= tokens
            arms.emitted(tokens)
        arms.idle()
        clock.now += 100.0
    assert taken[-LONGEST:].count(costly_s < 2.0) >= LONGEST - 2 * TRIAL


def test_answers_of_one_step_are_trials_too() -> None:
    clock = Clock()
    arms, taken = TwoArmedBandit(clock), []
    for _ in range(4 * TRIAL):
        taken.append(arms.begin())
        clock.now += 3.0 if taken[-1] else 1.0
        arms.emitted(1)
        arms.idle()
    assert not all(taken)


def test_a_hybrids_tree_is_as_large_as_the_larger_part_s() -> None:
    for ngram, neural, most in ((Fixed(1, 0.4), Large(), 9), (Large(), Fixed(1, 0.4), 9)):
        assert most_tokens(HybridProposer(ngram, neural)) == most
    assert most_tokens(Fixed(1, 0.4)) == Fixed(1, 0.4).max_depth


def test_time_in_which_nobody_waits_is_no_step_s() -> None:
    clock = Clock()
    arms = TwoArmedBandit(clock)
    for step in range(2 * TRIAL + 2):
        costly = arms.begin()
        clock.now += 1.0
        arms.emitted(2 if costly else 1)
        if step == 3:
            arms.idle()
            clock.now += 1e6
    assert arms.begin()
