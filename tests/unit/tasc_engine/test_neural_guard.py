"""A drafter that fails or is slow is off for good, and nobody else notices."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draft_trees import forest

from tasc_draft import Drafts
from tasc_engine.neural.guard import FAILURES, STEPS, GuardedProposer
from tasc_engine.neural.hybrid import HybridProposer
from tasc_engine.neural.wants import Wants

ROWS, BUDGET = np.array([0, 3], np.int32), np.array([2, 2], np.int32)
PROMPT = np.array([1, 2], np.int32)


class Neural:
    """Drafts a chain of two for each row, in so many seconds, or raises."""

    max_depth = 2
    wants = Wants(hidden=True)

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.1
        self.raising: set[str] = set()
        self.drafts = forest([[-1, 0], [-1, 0]])
        self.calls: list[tuple[Any, ...]] = []

    def clock(self) -> float:
        return self.now

    def _called(self, name: str, *args: Any) -> None:
        self.calls.append((name, *args))
        if name in self.raising:
            raise RuntimeError("no memory")

    def start(self, row: int, prompt: Any) -> None:
        self._called("start", row)

    def observe(self, row: int, tokens: Any, hidden: Any = None) -> None:
        self._called("observe", row, hidden)

    def finish(self, row: int) -> None:
        self._called("finish", row)

    def propose(self, rows: Any, budget: Any, least: Any = None) -> Drafts:
        self.now += self.seconds
        self._called("propose", budget.tolist())
        return self.drafts


class Ngrams(Neural):
    """Takes a guest in, and drafts what it always does."""

    def propose(self, rows: Any, budget: Any, least: Any = None, guest: Any = None) -> Drafts:
        return super().propose(rows, budget, least)


class Guarded:
    def __init__(self) -> None:
        self.neural = Neural()
        self.proposer = GuardedProposer(self.neural, 10, 0.5, self.neural.clock)
        self.drafted: list[list[int]] = []
        self.off: list[str] = []
        self.proposer.on_drafted = lambda rows: self.drafted.append(rows.tolist())
        self.proposer.on_off = self.off.append

    def propose(self) -> int:
        """How many tokens are drafted."""
        return len(self.proposer.propose(ROWS, BUDGET).tokens)


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


def test_a_drafter_that_works_is_passed_through(guarded: Guarded) -> None:
    assert (guarded.proposer.max_depth, guarded.proposer.wants) == (2, Wants(hidden=True))
    guarded.proposer.start(3, PROMPT)
    guarded.proposer.observe(3, PROMPT, "seen")
    assert guarded.propose() == 4
    guarded.proposer.finish(3)
    assert guarded.neural.calls == [
        ("start", 3), ("observe", 3, "seen"), ("propose", [2, 2]), ("finish", 3),
    ]  # fmt: skip
    assert guarded.drafted == [[0, 3]]


def test_only_failures_in_a_row_switch_it_off_for_good(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    for failures in (FAILURES - 1, FAILURES - 1, FAILURES):
        assert guarded.propose() == 4
        guarded.neural.raising = {"propose"}
        assert [guarded.propose() for _ in range(failures)] == [0] * failures
        guarded.neural.raising = set()
    assert guarded.off == ["failed"]
    calls = len(guarded.neural.calls)
    guarded.proposer.start(0, PROMPT)
    guarded.proposer.observe(0, PROMPT)
    guarded.proposer.finish(0)
    assert guarded.propose() == 0
    assert len(guarded.neural.calls) == calls
    told = [r.getMessage() for r in caplog.records if "is off until a restart" in r.getMessage()]
    assert len(told) == 1
    assert "failed 3 times in a row, at last by RuntimeError('no memory')" in told[0]
    assert "--unset drafter" in told[0]


def test_drafts_that_are_no_trees_are_a_failure(guarded: Guarded) -> None:
    guarded.neural.drafts = forest([[-1, 0], [-1, 0]], [[1, 2], [3, 10]])  # ids are below 10
    assert [guarded.propose() for _ in range(FAILURES)] == [0] * FAILURES
    assert guarded.off == ["failed"]


def test_a_row_that_could_not_be_told_is_not_drafted_for_until_it_is_started_again(
    guarded: Guarded,
) -> None:
    guarded.neural.raising = {"observe"}
    guarded.proposer.start(3, PROMPT)
    for _ in range(2 * FAILURES):
        guarded.proposer.observe(3, PROMPT)
    guarded.neural.drafts = forest([[-1, 0], []])
    assert guarded.propose() == 2
    assert guarded.neural.calls[-1] == ("propose", [2, 0])
    guarded.proposer.finish(3)
    guarded.proposer.start(3, PROMPT)
    guarded.propose()
    assert guarded.neural.calls[-1] == ("propose", [2, 2])
    assert guarded.off == []


def test_rows_that_nobody_can_begin_switch_it_off(guarded: Guarded) -> None:
    guarded.neural.raising = {"start"}
    for row in range(FAILURES):
        guarded.proposer.start(row, PROMPT)
    assert guarded.off == ["failed"]


def test_a_row_in_use_may_be_started_again(guarded: Guarded) -> None:
    guarded.proposer.start(3, PROMPT)
    guarded.proposer.start(3, PROMPT)
    assert guarded.neural.calls == [("start", 3), ("finish", 3), ("start", 3)]


def test_the_median_of_a_step_s_seconds_switches_it_off_and_no_single_one(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.neural.seconds = 60.0  # the first steps compile
    for step in range(3 * STEPS):
        assert guarded.propose() == 4
        guarded.neural.seconds = 9.0 if step % 3 == 0 else 0.5
    assert guarded.off == []
    guarded.neural.seconds = 0.6
    drafted = [guarded.propose() for _ in range(STEPS)]
    assert guarded.off == ["slow"]
    assert drafted[-1] == 0
    assert "took 0.55 s, the limit is 0.5 s" in caplog.text


def test_n_grams_go_on_where_the_drafter_is_off(guarded: Guarded) -> None:
    ngram = Ngrams()
    ngram.drafts = replace(ngram.drafts, logp=np.log(np.full(4, 0.5, np.float32)))
    hybrid = HybridProposer(ngram, guarded.proposer)
    guarded.neural.raising = {"start", "observe", "propose", "finish"}
    hybrid.start(0, PROMPT)
    hybrid.observe(0, PROMPT)
    drafted = [len(hybrid.propose(ROWS, BUDGET).tokens) for _ in range(FAILURES + 1)]
    hybrid.finish(0)
    assert drafted == [4] * (FAILURES + 1)
    asked = 2 * (FAILURES + 1)  # how sure they are, and then for drafts
    assert [call[0] for call in ngram.calls] == ["start", "observe", *["propose"] * asked, "finish"]
    assert guarded.off == ["failed"]
