"""A proposer stays consistent through any steps, and its check sees when it is not."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from draft_cases import (
    SEP,
    TARGET,
    VOCAB,
    begun,
    full_index,
    ids,
    limits_of,
    make_index,
    make_proposer,
    propose,
    tagged_rows,
)
from draft_checks import assert_valid, tree

from tasc_draft import DraftSettings, NgramProposer
from tasc_draft.mixture.contexts import MOST

ROWS, ROOM = 3, 40


class Operations:
    """Random operations on a proposer, with what they need to know of its rows."""

    def __init__(self, mixture: str, seed: int) -> None:
        self.rng = Random(seed)
        prompts, outputs = tagged_rows(seed, 20)
        canonical = np.arange(VOCAB + 1, dtype=np.int32)
        canonical[[1, 7]] = 3
        # Answers along this one grow contexts that are too long to be kept whole.
        self.script = self.rng.choices(range(1, 6), k=ROOM)
        self.indexes = [
            make_index([]),
            make_index(outputs),
            make_index(outputs[:9], prompts[:9], canonical=canonical),
            make_index([self.script]),
            full_index(1),
            full_index(2),
        ]
        self.settings = DraftSettings(
            mixture=mixture, num_speculative_tokens=8, min_prob=0.02, neighbours=4,
            neighbour_tokens=24, recent_tokens=50, learning_rate=0.2,
        )  # fmt: skip
        self.proposer = make_proposer(
            self.indexes[0], self.settings, rows=ROWS, capacity=ROOM, nodes=16
        )
        self.used = [0] * ROWS  # tokens of each row's text, 0 for a free one
        self.begin = [0] * ROWS  # of its answer
        self.scripted = [False] * ROWS
        self.paths: dict[int, list[int]] = {}  # the deepest that was drafted for a row
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        row = self.rng.randrange(ROWS)
        if self.rng.random() < 0.01:
            self.proposer.set_index(self.rng.choice(self.indexes))
            self.seen["index"] += 1
        elif not self.used[row]:
            prompt = self.tokens(self.rng.randrange(ROOM // 2))
            self.proposer.start(row, ids(prompt))
            self.used[row] = self.begin[row] = len(prompt) + 1
            self.scripted[row] = self.rng.random() < 0.2
            self.seen["start"] += 1
        elif self.rng.random() < 0.45:
            self.draft()
        else:
            self.go_on(row)

    def draft(self) -> None:
        running = [row for row in range(ROWS) if self.used[row]]
        batch = self.rng.sample(running, self.rng.randrange(1, len(running) + 1))
        wanted = [self.rng.randrange(-1, 12) for _ in batch]
        budget = self.rng.randrange(17)
        least = np.full(budget, self.rng.choice([0.0, 0.0, 0.1]), np.float32)
        drafts = self.proposer.propose(ids(batch), ids(wanted), least)
        assert_valid(drafts, [limits_of(self.settings, most) for most in wanted], budget)
        for place, row in enumerate(batch):
            self.paths[row] = path = [*max(tree(drafts, place), key=len, default=())]
            self.seen["drafted" if path else "empty"] += 1
            self.seen["deep"] += len(path) > 2
            context = self.proposer._memory.rows[row]
            self.seen["long"] += int(context["contexts"][0, 0]) >= MOST

    def go_on(self, row: int) -> None:
        """Take in what was drafted last, or the script, or anything; now and then end the row."""
        told = self.paths.pop(row, [])[: self.rng.randrange(9)]
        if self.scripted[row]:
            told = self.script[self.used[row] - self.begin[row] :][: self.rng.randrange(6)]
        elif self.rng.random() < 0.2:
            told = self.tokens(self.rng.randrange(5))
        if self.used[row] + len(told) > ROOM or self.rng.random() < 0.05:
            self.proposer.finish(row)
            self.used[row] = 0
            self.seen["finish"] += 1
            return
        self.proposer.observe(row, ids(told))
        self.used[row] += len(told)
        self.seen["observe"] += 1

    def tokens(self, n: int) -> list[int]:
        return self.rng.choices([*range(8)] * 4 + [*range(TARGET)], k=n)


@pytest.mark.parametrize(
    ("mixture", "short", "long"),
    [("mixed", 10_000, 80_000), ("tasc", 3_000, 10_000), ("trie", 3_000, 10_000)],
)
def test_any_operations_leave_a_proposer_consistent(
    mixture: str, short: int, long: int, everything: bool, seed: int
) -> None:
    run, operations = Operations(mixture, seed), long if everything else short
    for _ in range(operations):
        run.step()
        run.proposer.check_integrity()
    kinds = ("index", "start", "drafted", "empty", "deep", "finish", "observe")
    assert all(run.seen[kind] > operations // 400 for kind in kinds), run.seen
    if mixture == "mixed":
        assert run.seen["long"] > operations // 4000, run.seen
        assert run.proposer._memory.growth["recent_end"][0] > 0


def busy() -> NgramProposer:
    """Every source at work: three rows in mid-answer, and answers that were finished."""
    proposer = make_proposer(full_index(), DraftSettings(min_prob=0.0, recent_tokens=50))
    prompts, outputs = tagged_rows(3, 6)
    for prompt, output in zip(prompts, outputs, strict=True):
        begun(proposer, 2, prompt, [*output, 0])
        proposer.finish(2)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if row < 3:
            begun(proposer, row, prompt, output * 2)
            propose(proposer, row)
    proposer.check_integrity()
    return proposer


def set_in(array: Any, value: Any) -> None:
    assert array != value
    array[...] = value


def repeat_the_last_context(row: Any) -> None:
    n = row["num_contexts"][0]
    row["contexts"][0, n] = row["contexts"][0, n - 1]
    row["num_contexts"] = n + 1


TAMPERINGS: dict[str, Callable[[Any], None]] = {
    "length": lambda m: set_in(m.rows[1:2]["length"], 0),
    "caught too few": lambda m: set_in(m.rows[1:2]["caught"], 4),
    "caught too many": lambda m: set_in(m.rows[1:2]["caught"], 60),
    "begin": lambda m: set_in(m.rows[1:2]["begin"], 0),
    "root": lambda m: set_in(m.rows[1:2]["root"], 10_000),
    "begun": lambda m: set_in(m.rows[1:2]["begun"], 0),
    "words": lambda m: set_in(m.rows[1:2]["words"], 0),
    "a word": lambda m: set_in(m.words.hashes[1, :1], 0),
    "mark": lambda m: set_in(m.texts[1, m.rows[1]["begin"], None], 1),
    "text": lambda m: set_in(m.texts[1, :1], 7),
    "key": lambda m: set_in(m.own.tokens[1, :1], 7),
    "previous": lambda m: set_in(m.own.previous[1, -1 + m.rows[1]["length"], None], 0),
    "last": lambda m: set_in(m.own.last[1, 8:9], 0),
    "last of a token not there": lambda m: set_in(m.own.last[1, 11:12], 0),
    "no contexts": lambda m: set_in(m.rows[1:2]["num_contexts"], 0),
    "context too few": lambda m: set_in(m.rows[1:2]["num_contexts"], m.rows[1]["num_contexts"] - 1),
    "too many contexts": lambda m: set_in(m.rows[1:2]["num_contexts"], 100),
    "context length": lambda m: set_in(m.rows["contexts"][1:2, 0, 0], 1),
    "context begin": lambda m: set_in(m.rows["contexts"][1:2, 0, 1], 0),
    "context end": lambda m: set_in(m.rows["contexts"][1:2, 0, 2], m.rows["contexts"][1, 0, 2] + 1),
    "context in vain": lambda m: repeat_the_last_context(m.rows[1:2]),
    "near length": lambda m: set_in(m.rows[1:2]["near_length"], 3),
    "near token": lambda m: set_in(m.near.tokens[1, 1:2], 7),
    "near mark": lambda m: set_in(m.near.tokens[1, :1], 1),
    "near previous": lambda m: set_in(m.near.previous[1, :1], 3),
    "near last": lambda m: set_in(m.near.last[1, SEP, None], 0),
    "near weight": lambda m: set_in(m.near_weight[1, :1], 2),
    "near weight unknown": lambda m: set_in(m.near_weight[1, :1], np.nan),
    "near of a free row": lambda m: m.rows.__setitem__("length", 0),
    "recent end": lambda m: set_in(m.growth["recent_end"], m.growth["recent_end"][0] - 1),
    "recent token": lambda m: set_in(m.recent.tokens[0, 1:2], 7),
    "recent previous": lambda m: set_in(m.recent.previous[0, :1], 3),
}


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_a_tampered_row_is_found(tampering: Callable[[Any], None]) -> None:
    proposer = busy()
    tampering(proposer._memory)
    with pytest.raises(AssertionError, match=r"^row [01]: its|^the recent answers"):
        proposer.check_integrity()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_found(value: float) -> None:
    proposer = busy()
    proposer._learnt.weights[5] = value
    with pytest.raises(AssertionError, match=r"weights .* are damaged"):
        proposer.check_integrity()
