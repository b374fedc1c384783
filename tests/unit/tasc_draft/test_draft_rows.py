"""Tests that rows of a proposer start, fill and end, and that damaged memory is reported."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import draft_cases as dc
import numpy as np
import pytest
from draft_checks import assert_same_up_to_ties, assert_valid, trees
from hypothesis import given
from hypothesis import strategies as st

from proposer_integrity import check_rows
from support import refused
from tasc_draft import DraftError, DraftIndex, DraftSettings, NgramProposer, read_index, write_index
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.mixture import tree as compiled_tree
from tasc_draft.mixture.row_state import MAX_CONTEXT

few = dc.examples(35, 100)
parts = st.lists(dc.answers, max_size=4)
# Nothing is learnt or remembered, so that a draft depends on its own row only.
mixtures = st.one_of(
    dc.mixed.map(lambda setting: dataclasses.replace(setting, recent_tokens=0, learning_rate=0)),
    st.sampled_from(["tasc", "trie"]).map(lambda name: DraftSettings(mixture=name, min_prob=0.01)),
)
Part = tuple[list[int], list[int]]


@few
@given(dc.indexes, mixtures, dc.prompts, parts)
def test_observing_in_parts_equals_observing_at_once(index, setting, prompt, parts):
    stepwise = dc.make_proposer(index, setting)
    stepwise.start(0, dc.ids(prompt))
    answer: list[int] = []
    for part in parts:
        dc.propose(stepwise)
        stepwise.observe(0, dc.ids(part))
        answer += part
        # A corpus context grows to twelve tokens and is then cut, so its start matters.
        if len(answer) < 12:
            assert dc.propose(stepwise) == dc.propose(dc.started(index, setting, (prompt, answer)))


def test_rejected_draft_is_never_matched() -> None:
    """Prompt 1 2 1 drafts "2 1 2 ..."; the target emits 3, which must not follow the draft."""
    setting = DraftSettings(mixture="tasc", corpus_weight=0.0, min_prob=0.0)
    proposer = dc.started(dc.make_index([]), setting, ([1, 2, 1, 4], [1]))
    assert (2,) in dc.propose(proposer)
    proposer.observe(0, dc.ids([3]))
    assert dc.propose(proposer) == {}


@few
@given(dc.indexes, mixtures, dc.rows, st.booleans())
def test_drafts_of_one_row_do_not_depend_on_other_rows(index, setting, rows, branching):
    together = dc.make_proposer(index, setting, branching=branching)
    for row, (prompt, *_) in enumerate(rows):
        together.start(row, dc.ids(prompt))
    every, limits = dc.ids(range(len(rows))), dc.ids([limit for *_, limit in rows])
    together.propose(every, limits)
    for row, (_, answer, _) in enumerate(rows):
        together.observe(row, dc.ids(answer))
    drafts = trees(together.propose(every[::-1].copy(), limits[::-1].copy()))
    for nodes, row in zip(drafts[::-1], rows, strict=True):
        alone = dc.started(index, setting, row, branching=branching)
        assert_same_up_to_ties(nodes, dc.propose(alone, 0, row[2]))


@few
@given(dc.indexes, mixtures, dc.rows, dc.rows)
def test_finished_row_restarts_without_history(index, setting, old, new):
    proposer = dc.started(index, setting, old[0])
    dc.propose(proposer)
    proposer.observe(0, dc.ids([1, 2]))
    proposer.finish(0)
    prompt, answer, _ = new[0]
    dc.begun(proposer, 0, prompt, answer)
    assert dc.propose(proposer) == dc.propose(dc.started(index, setting, new[0]))


@few
@given(
    dc.indexes, dc.indexes, mixtures, dc.prompts, st.tuples(dc.answers, dc.answers), st.booleans()
)
def test_index_swapped_during_an_answer_drafts_like_an_index_from_the_start(
    old: DraftIndex, new: DraftIndex, setting: DraftSettings, prompt: list[int], parts: Part,
    drafted: bool,
) -> None:  # fmt: skip
    before, after = parts
    proposer = dc.started(old, setting, (prompt, before))
    if drafted:  # else the row has not caught up with its text
        dc.propose(proposer)
    proposer.set_index(new)
    assert dc.propose(proposer) == dc.propose(dc.started(new, setting, (prompt, before)))
    proposer.observe(0, dc.ids(after))
    assert dc.propose(proposer) == dc.propose(dc.started(new, setting, (prompt, before + after)))


@pytest.mark.parametrize(
    ("unusable", "named"),
    [
        (DraftIndex.empty(dc.FINGERPRINT, 9), ["vocabulary of 9", "12"]),
        (
            DraftIndex(CorpusIndex.empty(dc.FINGERPRINT, dc.VOCAB, depth=MAX_CONTEXT)),
            ["12 tokens", "depth"],
        ),
    ],
    ids=["another vocabulary", "sorted by too few tokens"],
)
def test_unusable_index_is_refused_and_the_old_index_stays(unusable, named):
    proposer = dc.started(dc.make_index([[1, 2]]), DraftSettings(min_prob=0.0), ([3], [1]))
    before = dc.propose(proposer)
    with refused(DraftError, *named):
        proposer.set_index(unusable)
    assert dc.propose(proposer) == before != {}
    check_rows(proposer)


def test_row_in_use_cannot_be_started() -> None:
    proposer = dc.started(dc.make_index([]), DraftSettings(), ([3], []))
    with refused(DraftError, "row 0"):
        proposer.start(0, dc.ids([1]))
    proposer.finish(0)
    proposer.start(0, dc.ids([1]))


@pytest.mark.parametrize("prompt_length", [0, 1, 16])
@pytest.mark.parametrize("mixture", ["mixed", "tasc"])
def test_row_cannot_be_filled_beyond_its_capacity(mixture, prompt_length):
    setting = DraftSettings(mixture=mixture, min_prob=0.0, learning_rate=0.0, recent_tokens=0)
    index = dc.make_index([[1, 2, 3, 4] * 3])
    proposer = dc.make_proposer(index, setting, rows=2, capacity=16)
    prompt, answer = ([4, 3] * 8)[:prompt_length], ([1, 2, 3, 4] * 4)[: 16 - prompt_length]
    proposer.start(1, dc.ids([2, 3]))
    neighbour = dc.propose(proposer, 1)
    proposer.start(0, dc.ids(prompt))
    for token in answer:
        proposer.observe(0, dc.ids([token]))
    expected = dc.propose(dc.started(index, setting, (prompt, answer)))
    assert len(expected) > 2
    assert dc.propose(proposer) == expected
    with refused(DraftError, "17 tokens", "capacity of 16"):
        proposer.observe(0, dc.ids([1]))
    assert (dc.propose(proposer), dc.propose(proposer, 1)) == (expected, neighbour)


def test_prompts_that_do_not_fit_are_refused_and_the_row_stays_free() -> None:
    proposer = dc.make_proposer(dc.make_index([[1, 2]]), DraftSettings(), capacity=5)
    for alien in (-1, dc.TARGET + 1):
        with refused(DraftError, "vocabulary", "16"):
            proposer.start(0, dc.ids([1, alien]))
    with refused(DraftError, "capacity of 5"):
        proposer.start(0, dc.ids([1] * 6))
    with refused(DraftError, "capacity of 5"):
        proposer.teach(dc.ids([1] * 3), dc.ids([2] * 3), 0.1)
    check_rows(proposer)
    proposer.start(0, dc.ids([1] * 5))


def test_unknown_ids_match_nothing() -> None:
    proposer = dc.started(dc.make_index([[1, 2]]), DraftSettings(min_prob=0.0), ([1, 2], []))
    proposer.observe(0, dc.ids([1, 2**31 - 1, -5]))
    dc.propose(proposer)
    check_rows(proposer)
    proposer.observe(0, dc.ids([1]))
    assert (2,) in dc.propose(proposer)
    check_rows(proposer)


def test_unused_rows_are_not_drafted() -> None:
    proposer = dc.started(dc.make_index([[1, 2]]), DraftSettings(min_prob=0.0), ([3], [1]))
    for unused in (1, 3, -1):
        drafts = proposer.propose(dc.ids([unused, 0, unused]), dc.ids([5] * 3))
        assert np.diff(drafts.offsets).tolist() == [0, len(dc.propose(proposer, 0, 5)), 0]
    with refused(DraftError, "4 rows", "3"):
        proposer.propose(dc.ids([0, 1, 2, 0]), dc.ids([5] * 4))


@pytest.mark.parametrize(("budget", "least"), [(0, None), (4, np.zeros(0, np.float32))])
def test_row_starts_at_its_first_drafted_step(budget, least) -> None:
    settings = DraftSettings(min_prob=0.0, neighbours=2, learning_rate=0.0)
    index = dc.full_index(1)
    proposer = dc.make_proposer(index, settings)
    for row in (0, 1):
        proposer.start(row, dc.ids([2, 1, 4]))
        for token in (5, 3):
            dc.propose(proposer, row, 4 * row)
            if row == 0:
                drafts = proposer.propose(dc.ids([0]), dc.ids([budget]), least)
                assert len(drafts.tokens) == 0
            assert (proposer.memory.rows["length"][row] > 0) == (row == 1)
            proposer.observe(row, dc.ids([token]))
    check_rows(proposer)
    at_once = dc.started(index, settings, ([2, 1, 4], [5, 3]))
    assert dc.propose(proposer, 0) == dc.propose(at_once) != {}
    assert proposer.memory.rows["words"][0] > 0


@pytest.mark.parametrize("answers", [1, 63, 200])
def test_undrafted_answers_become_recent_answers(answers) -> None:
    settings = DraftSettings(min_prob=0.0, recent_tokens=64)
    proposer = dc.make_proposer(dc.make_index([]), settings, rows=2)
    growth = proposer.memory.growth
    for done in range(answers):
        proposer.start(0, dc.ids([1]))
        proposer.observe(0, dc.ids([7, 8]))
        proposer.observe(0, dc.ids([2**31 - 1, 9, dc.EOS]))
        proposer.finish(0)
        assert (growth["recent_end"][0] > 0) == (done >= 63)  # many are added together
    proposer.start(1, dc.ids([1]))
    proposer.observe(1, dc.ids([7]))
    assert (8,) in dc.propose(proposer, 1)
    check_rows(proposer)
    kept = proposer.memory.recent.tokens[0][: growth["recent_end"][0]]
    assert kept[-7:].tolist() == [dc.SEP, 7, 8, dc.SEP, 9, dc.EOS, -1]


def test_answer_tokens_waiting_to_become_recent_answers_are_bounded() -> None:
    settings = DraftSettings(recent_tokens=1 << 16)
    proposer = dc.make_proposer(dc.make_index([]), settings, rows=1, capacity=2048)
    growth = proposer.memory.growth
    for done in range(4):
        proposer.start(0, dc.ids([1]))
        proposer.observe(0, np.full(2000, 7, np.int32))
        proposer.finish(0)
        assert (growth["recent_end"][0] > 0) == (done >= 2)
    check_rows(proposer)


def test_empty_prompt_drafts_from_the_document_mark() -> None:
    setting = DraftSettings(mixture="tasc")
    proposer = dc.started(dc.make_index([[1, 2]]), setting, ([], []))
    assert [*dc.propose(proposer)] == [(1,), (1, 2), (1, 2, dc.EOS)]
    assert dc.propose(dc.started(dc.make_index([]), setting, ([], []))) == {}


def test_newest_answers_replace_the_oldest() -> None:
    setting = DraftSettings(recent_tokens=30, sources=("recent",), min_prob=0.0)
    proposer = dc.make_proposer(dc.make_index([]), setting)
    for first in range(1, 12):
        dc.begun(proposer, 0, [], [first, 12 - first, dc.EOS])
        proposer.finish(0)
    proposer.start(0, dc.ids([]))
    firsts = {path[0] for path in dc.propose(proposer)}
    assert {10, 11} <= firsts
    assert not firsts & {1, 2, 3}


def test_proposer_memory_grows_with_rows_and_capacity() -> None:
    index = dc.make_index([[1, 2]])
    sizes = [
        dc.make_proposer(index, DraftSettings(), rows=rows, capacity=capacity).nbytes
        for rows, capacity in ((1, dc.CAPACITY), (2, dc.CAPACITY), (2, 2 * dc.CAPACITY))
    ]
    assert sizes == sorted(sizes)
    assert sizes[2] - sizes[1] >= 2 * dc.CAPACITY * 3 * 4
    assert np.diff(sizes).min() > 0


@few
@given(dc.indexes, dc.mixed, dc.prompts, dc.answers)
def test_row_that_was_prepared_drafts_like_any_other(index, setting, prompt, answer) -> None:
    proposer, ready = dc.make_proposer(index, setting, spare=2), dc.ids(prompt)
    proposer.prepare([(ready, None)])
    proposer.start(1, ready)
    check_rows(proposer)
    proposer.observe(1, dc.ids(answer))
    assert dc.propose(proposer, 1) == dc.propose(dc.started(index, setting, (prompt, answer)))


def test_answer_of_an_ended_row_is_learnt_when_the_next_rows_are_prepared() -> None:
    setting = DraftSettings(min_prob=0.0, learning_rate=0.2, recent_tokens=50)
    prompts, outputs = dc.tagged_rows(3, 6)
    later, now = (dc.make_proposer(dc.full_index(), setting, spare=s) for s in (2, 0))
    for prompt, output in zip(prompts, outputs, strict=True):
        for proposer in (later, now):
            dc.begun(proposer, 0, prompt, output[:1])
            dc.propose(proposer)
            proposer.observe(0, dc.ids([*output[1:], dc.EOS]))
            proposer.finish(0)
        before = int(later.memory.growth["recent_end"][0])
        dc.begun(later, 1, [1], [])  # the row that ended is drafted for in no further step
        dc.propose(later, 1)
        later.finish(1)
        later.prepare([])
        assert later.memory.growth["recent_end"][0] > before
        check_rows(later)
    assert (later.weights.values == now.weights.values).all()
    assert (later.memory.recent.tokens == now.memory.recent.tokens).all()


def test_lanes_of_cancelled_prompts_and_ended_rows_are_used_again() -> None:
    proposer = dc.make_proposer(dc.full_index(), DraftSettings(), spare=2)
    kept, *others = (dc.ids([1, 2, i]) for i in range(8))
    for cancelled in others:
        proposer.prepare([(kept, None)])
        proposer.prepare([(cancelled, None), (kept, None)])
        for row in range(3):  # all rows end at once, more than there are spare lanes
            proposer.start(row, dc.ids([row]))
            dc.propose(proposer, row)
        for row in range(3):
            proposer.finish(row)
        check_rows(proposer)
    proposer.prepare([])
    assert len(proposer._free) == 5
    assert not proposer.memory.rows["length"].any()


ROWS, ROOM = 3, 40


class Operations:
    """Random operations on a proposer, with the state of its rows."""

    def __init__(self, mixture: str, seed: int, spare: int = 0) -> None:
        self.rng = Random(seed)
        prompts, outputs = dc.tagged_rows(seed, 20)
        canonical = np.arange(dc.VOCAB + 1, dtype=np.int32)
        canonical[[1, 7]] = 3
        # Answers along this one grow contexts that are too long to be kept whole.
        self.script = self.rng.choices(range(1, 6), k=ROOM)
        self.indexes = [
            dc.make_index([]),
            dc.make_index(outputs),
            dc.make_index(outputs[:9], prompts[:9], canonical=canonical),
            dc.make_index([self.script]),
            dc.full_index(1),
            dc.full_index(2),
        ]
        self.settings = DraftSettings(
            mixture=mixture, num_speculative_tokens=8, min_prob=0.02, neighbours=4,
            neighbour_tokens=24, recent_tokens=50, learning_rate=0.2,
        )  # fmt: skip
        self.proposer = dc.make_proposer(
            self.indexes[0], self.settings, rows=ROWS, capacity=ROOM, nodes=16, spare=spare
        )
        self.spare = spare
        self.waiting: list[np.ndarray] = []  # prompts of the next rows
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
        elif self.spare and self.rng.random() < 0.2:
            self.prepare()
        elif not self.used[row]:
            prompt = self.waiting.pop(0) if self.waiting else self.prompt()
            self.proposer.start(row, prompt)
            self.used[row] = self.begin[row] = len(prompt) + 1
            self.scripted[row] = self.rng.random() < 0.2
            self.seen["start"] += 1
        elif self.rng.random() < 0.45:
            self.draft()
        else:
            self.go_on(row)

    def prompt(self) -> np.ndarray:
        return dc.ids(self.tokens(self.rng.randrange(ROOM // 2)))

    def prepare(self) -> None:
        """Works ahead for the waiting prompts, of which one may have been cancelled."""
        while len(self.waiting) < ROWS:
            self.waiting.append(self.prompt())
        if self.rng.random() < 0.2:
            self.waiting.pop(self.rng.randrange(ROWS))
        self.proposer.prepare([(prompt, None) for prompt in self.waiting])
        self.seen["prepare"] += 1

    def draft(self) -> None:
        running = [row for row in range(ROWS) if self.used[row]]
        batch = self.rng.sample(running, self.rng.randrange(1, len(running) + 1))
        wanted = [self.rng.randrange(-1, 12) for _ in batch]
        budget = self.rng.randrange(17)
        least = np.full(budget, self.rng.choice([0.0, 0.0, 0.1]), np.float32)
        drafts = self.proposer.propose(dc.ids(batch), dc.ids(wanted), least)
        assert_valid(drafts, [dc.limits_of(self.settings, most) for most in wanted], budget)
        for nodes, row in zip(trees(drafts), batch, strict=True):
            self.paths[row] = path = [*max(nodes, key=len, default=())]
            self.seen["drafted" if path else "empty"] += 1
            self.seen["deep"] += len(path) > 2
            context = self.proposer.memory.rows[self.proposer._lane_of[row]]
            self.seen["long"] += int(context["contexts"][0, 0]) >= MAX_CONTEXT

    def go_on(self, row: int) -> None:
        """Emits the last draft, the script or random tokens; sometimes ends the row."""
        tokens = self.paths.pop(row, [])[: self.rng.randrange(9)]
        if self.scripted[row]:
            tokens = self.script[self.used[row] - self.begin[row] :][: self.rng.randrange(6)]
        elif self.rng.random() < 0.2:
            tokens = self.tokens(self.rng.randrange(5))
        if self.used[row] + len(tokens) > ROOM or self.rng.random() < 0.05:
            self.proposer.finish(row)
            self.used[row] = 0
            self.seen["finish"] += 1
            return
        self.proposer.observe(row, dc.ids(tokens))
        self.used[row] += len(tokens)
        self.seen["observe"] += 1

    def tokens(self, n: int) -> list[int]:
        return self.rng.choices([*range(8)] * 4 + [*range(dc.TARGET)], k=n)


@pytest.mark.parametrize(
    ("mixture", "spare", "short", "long"),
    [
        ("mixed", 0, 10_000, 80_000),
        ("mixed", 4, 3_000, 80_000),
        ("tasc", 0, 3_000, 10_000),
        ("trie", 1, 3_000, 10_000),
    ],
)
def test_random_operations_keep_the_proposer_consistent(
    mixture, spare, short, long, everything, seed
):
    run, operations = Operations(mixture, seed, spare), long if everything else short
    # Long contexts are rare, so that a run goes on until there were enough of them.
    many, some = (operations // 200, 100) if everything else (0, 0)
    for done in range(4 * operations):
        if done >= operations and (mixture != "mixed" or run.seen["long"] > some):
            break
        run.step()
        check_rows(run.proposer)
    kinds = ["index", "start", "drafted", "empty", "deep", "finish", "observe"]
    kinds += ["prepare"] * (spare > 0)
    assert all(run.seen[kind] > many for kind in kinds), run.seen
    if mixture == "mixed":
        assert run.seen["long"] > some, run.seen
        assert run.proposer.memory.growth["recent_end"][0] > 0


def busy() -> NgramProposer:
    """Every source at work: three rows in mid-answer, and answers that were finished."""
    proposer = dc.make_proposer(dc.full_index(), DraftSettings(min_prob=0.0, recent_tokens=50))
    prompts, outputs = dc.tagged_rows(3, 6)
    for prompt, output in zip(prompts, outputs, strict=True):
        dc.begun(proposer, 2, prompt, [*output, 0])
        proposer.finish(2)
    for row, (prompt, output) in enumerate(zip(prompts[:3], outputs, strict=False)):
        dc.begun(proposer, row, prompt, output * 2)
        dc.propose(proposer, row)
    check_rows(proposer)
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
    "root": lambda m: set_in(m.rows[1:2]["root"], 10_000),
    "begun": lambda m: set_in(m.rows[1:2]["begun"], 0),
    "words": lambda m: set_in(m.rows[1:2]["words"], 0),
    "a word": lambda m: set_in(m.words.hashes[1, :1], 0),
    "mark": lambda m: set_in(m.texts[1, m.rows[1]["begin"], None], 1),
    "text": lambda m: set_in(m.texts[1, :1], 7),
    "key": lambda m: set_in(m.own.tokens[1, :1], 7),
    "previous": lambda m: set_in(m.own.previous[1, -1 + m.rows[1]["length"], None], 0),
    "last": lambda m: set_in(m.own.last[1, 8:9], 0),
    "no contexts": lambda m: set_in(m.rows[1:2]["num_contexts"], 0),
    "context length": lambda m: set_in(m.rows["contexts"][1:2, 0, 0], 1),
    "context in vain": lambda m: repeat_the_last_context(m.rows[1:2]),
    "near token": lambda m: set_in(m.near.tokens[1, 1:2], 7),
    "near mark": lambda m: set_in(m.near.tokens[1, :1], 1),
    "near weight": lambda m: set_in(m.near_weight[1, :1], 2),
    "near of a free row": lambda m: m.rows.__setitem__("length", 0),
    "recent end": lambda m: set_in(m.growth["recent_end"], m.growth["recent_end"][0] - 1),
    "recent token": lambda m: set_in(m.recent.tokens[0, 1:2], 7),
}


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_tampered_row_is_detected(tampering: Callable[[Any], None]) -> None:
    proposer = busy()
    tampering(proposer.memory)
    with pytest.raises(AssertionError):
        check_rows(proposer)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_weight_is_detected(value: float) -> None:
    proposer = busy()
    proposer.learnt.weights[5] = value
    with pytest.raises(AssertionError):
        check_rows(proposer)


def test_in_memory_and_mapped_indexes_share_compiled_code(tmp_path: Path) -> None:
    compiled = []
    write_index(dc.full_index(), tmp_path / "index")
    for index in (dc.make_index([]), dc.full_index(), read_index(tmp_path / "index")):
        dc.propose(dc.started(index, DraftSettings(), ([1], [])))
        compiled.append(len(compiled_tree.grow.signatures))
    assert compiled[0] == compiled[1] == compiled[2] > 0
