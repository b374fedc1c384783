"""The hybrid: two drafts as one tree against a plain reading, what is learnt, and what is asked."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import Drafts
from tasc_engine.neural.arms import LONGEST, TRIAL, Always, Arms
from tasc_engine.neural.hybrid import HybridProposer
from tasc_engine.neural.merging import merge

Paths = dict[tuple[int, ...], float]  # conditional probabilities by path


def drafts_of(trees: list[Paths], source: int) -> Drafts:
    tokens, parents, depths, logp, offsets = [], [], [], [], [0]
    for tree in trees:
        places: dict[tuple[int, ...], int] = {(): -1}
        for path in sorted(tree, key=len):
            places[path] = len(places) - 1
            tokens.append(path[-1])
            parents.append(places[path[:-1]])
            depths.append(len(path))
            logp.append(sum(math.log(tree[path[: i + 1]]) for i in range(len(path))))
        offsets.append(len(tokens))
    return Drafts(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(depths, np.int16),
        np.array(offsets, np.int32), np.array(logp, np.float32),
        np.full(len(tokens), source, np.int8),
    )  # fmt: skip


def paths_of(drafts: Drafts, row: int) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    named: list[tuple[int, ...]] = []
    for i in range(drafts.offsets[row], drafts.offsets[row + 1]):
        above = drafts.parents[i]
        named.append((*(named[above] if above >= 0 else ()), int(drafts.tokens[i])))
        found[named[-1]] = float(np.exp(drafts.logp[i]))
        assert drafts.depths[i] == len(named[-1])
    return found


def mixed(one: Paths, other: Paths, weight: float) -> Paths:
    """Every path of either tree with its probability."""
    found: Paths = {}
    for path in sorted({*one, *other}, key=len):
        above = path[:-1]
        speaks = [any(p[:-1] == above for p in tree) for tree in (one, other)]
        share = (weight if speaks[1] else 1.0) if speaks[0] else 0.0
        own = share * one.get(path, 0.0) + (1 - share) * other.get(path, 0.0)
        found[path] = own * (found[above] if above else 1.0)
    return found


@st.composite
def trees(draw: st.DrawFn) -> Paths:
    paths: list[tuple[int, ...]] = [()]
    found: Paths = {}
    for _ in range(draw(st.integers(0, 7))):
        above = draw(st.sampled_from(paths))
        path = (*above, draw(st.integers(0, 3)))
        if path not in found:
            found[path] = draw(st.integers(1, 99)) / 400  # four children are at most certain
            paths.append(path)
    return found


@given(st.lists(st.tuples(trees(), trees(), st.integers(0, 8)), min_size=1, max_size=3))
def test_the_likeliest_paths_of_both_are_drafted(rows: list[tuple[Paths, Paths, int]]) -> None:
    weights = np.linspace(0.2, 0.9, len(rows), dtype=np.float32)
    budget = np.array([b for _, _, b in rows], np.int32)
    one, other = (drafts_of([row[side] for row in rows], side) for side in (0, 1))
    found = merge(one, other, weights, budget, None)
    for i, (a, b, most) in enumerate(rows):
        wanted = mixed(a, b, float(weights[i]))
        got = paths_of(found, i)
        assert len(got) == min(most, sum(p > 0 for p in wanted.values()))
        assert all(got[path] == pytest.approx(wanted[path], rel=1e-4) for path in got)
        left = [p for path, p in wanted.items() if path not in got]
        assert not got or not left or min(got.values()) >= max(left) * (1 - 1e-4)


def test_what_is_not_worth_its_cost_is_left_out_of_all_rows() -> None:
    one = drafts_of([{(1,): 0.9, (1, 2): 0.5}, {(3,): 0.6}], 0)
    other = drafts_of([{}, {}], 1)
    least = np.array([0.5, 0.5, 0.5, 0.5], np.float32)
    found = merge(one, other, np.ones(2, np.float32), np.full(2, 9, np.int32), least)
    assert [paths_of(found, row).keys() for row in (0, 1)] == [{(1,)}, {(3,)}]


@dataclass
class Fixed:
    """Always drafts one token."""

    token: int
    prob: float
    max_depth: int = 1
    asked: list[int] = field(default_factory=list)

    def start(self, row: int, prompt: object) -> None: ...

    def observe(self, row: int, tokens: object, hidden: object = None) -> None: ...

    def finish(self, row: int) -> None: ...

    def propose(self, rows: np.ndarray, budget: np.ndarray, least: object = None) -> Drafts:
        self.asked.append(int((budget > 0).sum()))
        tree: Paths = {(self.token,): self.prob}
        return drafts_of([tree if b else {} for b in budget], 0 if self.token == 1 else 6)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_learns_whom_to_believe() -> None:
    hybrid = HybridProposer(Fixed(1, 0.4), Fixed(2, 0.4), sure=1.0, arms=Always())
    row, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    hybrid.start(0, row)
    assert set(hybrid.weights) == {0.5}
    for _ in range(8):
        hybrid.propose(row, one)
        hybrid.observe(0, np.array([2], np.int32))
    assert hybrid.weights.min() < 0.01
    assert hybrid.propose(row, one).tokens.tolist() == [2]


def test_a_sure_row_is_not_drafted_for_by_the_model() -> None:
    neural = Fixed(2, 0.4)
    hybrid = HybridProposer(Fixed(1, 0.95), neural, sure=0.9, arms=Always())
    hybrid.start(0, np.zeros(1, np.int32))
    drafts = hybrid.propose(np.zeros(1, np.int32), np.ones(1, np.int32))
    assert (drafts.tokens.tolist(), neural.asked) == ([1], [])


@pytest.mark.parametrize(("always", "asked"), [(True, 4 * TRIAL), (False, 3 * TRIAL)])
def test_the_model_is_left_alone_now_and_then_unless_it_is_always_asked(
    always: bool, asked: int
) -> None:
    clock, neural = Clock(), Fixed(2, 0.4)
    hybrid = HybridProposer(Fixed(1, 0.4), neural, arms=Always() if always else Arms(clock))
    row, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    hybrid.start(0, row)
    for _ in range(4 * TRIAL):
        hybrid.propose(row, one)
        hybrid.observe(0, np.array([2], np.int32))
        clock.now += 1.0
    hybrid.finish(0)
    assert len(neural.asked) == asked


def test_a_hybrid_by_itself_tries_both_ways() -> None:
    neural = Fixed(2, 0.4)
    hybrid = HybridProposer(Fixed(1, 0.4), neural)
    row, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    for _ in range(TRIAL + 1):
        hybrid.propose(row, one)
    assert len(neural.asked) == TRIAL


@pytest.mark.parametrize("costly_s", [0.5, 3.0])
def test_the_faster_way_is_taken_nearly_always(costly_s: float) -> None:
    clock = Clock()
    arms, taken = Arms(clock), []
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
    arms, taken = Arms(clock), []
    for step in range(12_000):
        costly = arms.begin()
        taken.append(costly)
        clock.now += (0.5 if step < 3000 else 9.0) if costly else 1.0
        arms.emitted(1)
    assert taken[2500:3000].count(True) > 400
    assert taken[-1000:].count(False) > 900


def test_time_in_which_nobody_waits_is_no_step_s() -> None:
    clock = Clock()
    arms = Arms(clock)
    for step in range(2 * TRIAL + 2):
        costly = arms.begin()
        clock.now += 1.0
        arms.emitted(2 if costly else 1)
        if step == 3:
            arms.idle()
            clock.now += 1e6
    assert arms.begin()
