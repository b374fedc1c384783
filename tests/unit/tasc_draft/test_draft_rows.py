"""Proposers carry rows from step to step without one row, draft or index touching another."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from draft_cases import (
    CAPACITY,
    EOS,
    FINGERPRINT,
    SEP,
    TARGET,
    VOCAB,
    answers,
    begun,
    full_index,
    ids,
    make_index,
    make_proposer,
    mixed,
    outputs,
    prompts,
    propose,
)
from draft_checks import assert_same_up_to_ties, tree
from draft_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.mixture.contexts import MOST

few = examples(35, 100)
parts = st.lists(answers, max_size=4)
# Nothing is learnt or remembered, so that a draft depends on its own row only.
mixtures = st.one_of(
    mixed.map(lambda setting: dataclasses.replace(setting, recent_tokens=0, learning_rate=0)),
    st.sampled_from(["tasc", "trie"]).map(lambda name: DraftSettings(mixture=name, min_prob=0.01)),
)
small = st.builds(lambda outputs: make_index(outputs, outputs[::-1]), outputs)
indexes = small | st.integers(1, 2).map(full_index)


def started(
    index: DraftIndex, setting: DraftSettings, prompt: Sequence[int], answer: Sequence[int]
) -> NgramProposer:
    proposer = make_proposer(index, setting)
    begun(proposer, 0, prompt, answer)
    return proposer


@few
@given(indexes, mixtures, prompts, parts)
def test_an_answer_observed_in_parts_equals_one_observed_at_once(
    index: DraftIndex, setting: DraftSettings, prompt: list[int], parts: list[list[int]]
) -> None:
    stepwise = make_proposer(index, setting)
    stepwise.start(0, ids(prompt))
    answer: list[int] = []
    for part in parts:
        propose(stepwise, 0)
        stepwise.observe(0, ids(part))
        answer += part
        # A corpus context grows to twelve tokens and is then cut, so where it began tells.
        if len(answer) < 12:
            assert propose(stepwise, 0) == propose(started(index, setting, prompt, answer), 0)


def test_a_rejected_draft_is_never_matched() -> None:
    """Prompt 1 2 1 drafts "2 1 2 ..."; the target says 3, and 3 is not said to follow the draft."""
    setting = DraftSettings(mixture="tasc", corpus_weight=0.0, min_prob=0.0)
    proposer = started(make_index([]), setting, [1, 2, 1, 4], [1])
    assert (2,) in propose(proposer, 0)
    proposer.observe(0, ids([3]))
    assert propose(proposer, 0) == {}


@few
@given(indexes, mixtures, st.lists(st.tuples(prompts, answers), min_size=2, max_size=3))
def test_rows_do_not_touch_each_other(
    index: DraftIndex, setting: DraftSettings, rows: list[tuple[list[int], list[int]]]
) -> None:
    together = make_proposer(index, setting)
    for row, (prompt, _) in enumerate(rows):
        together.start(row, ids(prompt))
    every, limits = ids(range(len(rows))), ids([64] * len(rows))
    together.propose(every, limits)
    for row, (_, answer) in enumerate(rows):
        together.observe(row, ids(answer))
    drafts = together.propose(every[::-1].copy(), limits)
    for row, (prompt, answer) in enumerate(rows):
        alone = propose(started(index, setting, prompt, answer), 0)
        assert_same_up_to_ties(tree(drafts, len(rows) - 1 - row), alone)


@few
@given(indexes, mixtures, prompts, answers, prompts, answers)
def test_a_finished_row_starts_again_without_a_past(
    index: DraftIndex,
    setting: DraftSettings,
    old_prompt: list[int],
    old_answer: list[int],
    prompt: list[int],
    answer: list[int],
) -> None:
    proposer = started(index, setting, old_prompt, old_answer)
    propose(proposer, 0)
    proposer.observe(0, ids([1, 2]))
    proposer.finish(0)
    begun(proposer, 0, prompt, answer)
    assert propose(proposer, 0) == propose(started(index, setting, prompt, answer), 0)


@few
@given(indexes, indexes, mixtures, prompts, answers, answers, st.booleans())
def test_a_new_index_in_mid_answer_equals_having_had_it_from_the_start(
    old: DraftIndex,
    new: DraftIndex,
    setting: DraftSettings,
    prompt: list[int],
    before: list[int],
    after: list[int],
    drafted: bool,
) -> None:
    proposer = started(old, setting, prompt, before)
    if drafted:  # else the row has not caught up with its text
        propose(proposer, 0)
    proposer.set_index(new)
    assert propose(proposer, 0) == propose(started(new, setting, prompt, before), 0)
    proposer.observe(0, ids(after))
    assert propose(proposer, 0) == propose(started(new, setting, prompt, before + after), 0)


def test_an_index_of_another_vocabulary_is_refused_and_the_old_one_stays() -> None:
    proposer = started(make_index([[1, 2]]), DraftSettings(min_prob=0.0), [3], [1])
    before = propose(proposer, 0)
    with pytest.raises(ValueError, match=rf"vocabulary of 9.*{VOCAB}.*target's tokenizer"):
        proposer.set_index(DraftIndex.empty(FINGERPRINT, 9))
    assert propose(proposer, 0) == before != {}


def test_a_row_in_use_cannot_be_started() -> None:
    proposer = started(make_index([]), DraftSettings(), [3], [])
    with pytest.raises(ValueError, match="row 0 is in use; finish it"):
        proposer.start(0, ids([1]))
    proposer.finish(0)
    proposer.start(0, ids([1]))


@pytest.mark.parametrize("prompt_length", [0, 1, 16])
@pytest.mark.parametrize("mixture", ["mixed", "tasc"])
def test_a_row_can_be_filled_to_its_capacity_and_no_further(
    mixture: str, prompt_length: int
) -> None:
    setting = DraftSettings(mixture=mixture, min_prob=0.0, learning_rate=0.0, recent_tokens=0)
    index = make_index([[1, 2, 3, 4] * 3])
    proposer = make_proposer(index, setting, rows=2, capacity=16)
    prompt, answer = ([4, 3] * 8)[:prompt_length], ([1, 2, 3, 4] * 4)[: 16 - prompt_length]
    proposer.start(1, ids([2, 3]))
    neighbour = propose(proposer, 1)
    proposer.start(0, ids(prompt))
    for token in answer:
        proposer.observe(0, ids([token]))
    expected = propose(started(index, setting, prompt, answer), 0)
    assert len(expected) > 2
    assert propose(proposer, 0) == expected
    with pytest.raises(ValueError, match=r"row 0 has 16 tokens, 1 more .*capacity of 16"):
        proposer.observe(0, ids([1]))
    assert propose(proposer, 0) == expected
    assert propose(proposer, 1) == neighbour


def test_prompts_that_do_not_fit_are_refused_and_the_row_stays_free() -> None:
    proposer = make_proposer(make_index([[1, 2]]), DraftSettings(), capacity=5)
    for alien in (-1, TARGET + 1):
        with pytest.raises(ValueError, match=rf"{alien}.*target's own tokenizer"):
            proposer.start(0, ids([1, alien]))
    with pytest.raises(ValueError, match=r"6 tokens exceed .*capacity of 5"):
        proposer.start(0, ids([1] * 6))
    with pytest.raises(ValueError, match=r"6 tokens exceed .*capacity of 5"):
        proposer.teach(ids([1] * 3), ids([2] * 3), 0.1)
    proposer.check_integrity()
    proposer.start(0, ids([1] * 5))


def test_ids_from_nowhere_are_like_nothing() -> None:
    proposer = started(make_index([[1, 2]]), DraftSettings(min_prob=0.0), [1, 2], [])
    proposer.observe(0, ids([1, 2**31 - 1, -5]))
    propose(proposer, 0)
    proposer.check_integrity()
    proposer.observe(0, ids([1]))
    assert (2,) in propose(proposer, 0)
    proposer.check_integrity()


def test_rows_that_nobody_is_in_are_not_drafted_for() -> None:
    proposer = started(make_index([[1, 2]]), DraftSettings(min_prob=0.0), [3], [1])
    for nobody in (1, 3, -1):
        drafts = proposer.propose(ids([nobody, 0, nobody]), ids([5] * 3))
        assert np.diff(drafts.offsets).tolist() == [0, len(propose(proposer, 0, 5)), 0]
    with pytest.raises(ValueError, match="4 rows are drafted for, there are 3"):
        proposer.propose(ids([0, 1, 2, 0]), ids([5] * 4))


def test_an_index_sorted_by_too_few_tokens_is_refused_and_the_old_one_stays() -> None:
    proposer = started(make_index([[1, 2]]), DraftSettings(min_prob=0.0), [3], [1])
    shallow = DraftIndex(CorpusIndex.empty(FINGERPRINT, VOCAB, depth=MOST))
    with pytest.raises(ValueError, match=rf"sorted by {MOST} tokens.*depth above {MOST}"):
        proposer.set_index(shallow)
    assert propose(proposer, 0) != {}
    proposer.check_integrity()


def test_an_empty_prompt_drafts_from_the_document_mark() -> None:
    setting = DraftSettings(mixture="tasc")
    proposer = started(make_index([[1, 2]]), setting, [], [])
    assert [*propose(proposer, 0)] == [(1,), (1, 2), (1, 2, EOS)]
    assert propose(started(make_index([]), setting, [], []), 0) == {}


@few
@given(st.lists(st.lists(st.integers(0, 11), max_size=14), max_size=30), st.integers(0, 25))
def test_recent_answers_are_bounded_and_the_older_half_goes(
    answers: list[list[int]], room: int
) -> None:
    proposer = make_proposer(make_index([]), DraftSettings(recent_tokens=room))
    kept: list[int] = []
    for answer in answers:
        begun(proposer, 0, [1], answer)
        proposer.finish(0)
        entry = [SEP, *answer, -1]
        if not answer or len(entry) > room // 2:
            continue
        if len(kept) + len(entry) > room:
            kept = kept[len(kept) // 2 :]
        kept += entry
        end = proposer._memory.growth["recent_end"][0]
        assert proposer._memory.recent.tokens[0, :end].tolist() == kept
        assert len(kept) <= room
        proposer.check_integrity()


def test_the_newest_answers_are_drafted_and_the_oldest_no_longer() -> None:
    setting = DraftSettings(recent_tokens=30, sources=("recent",), min_prob=0.0)
    proposer = make_proposer(make_index([]), setting)
    for first in range(1, 12):
        begun(proposer, 0, [], [first, 12 - first, EOS])
        proposer.finish(0)
    proposer.start(0, ids([]))
    firsts = {path[0] for path in propose(proposer, 0)}
    assert {10, 11} <= firsts
    assert not firsts & {1, 2, 3}


def test_memory_is_counted_and_grows_with_rows_and_capacity() -> None:
    index = make_index([[1, 2]])
    sizes = [
        make_proposer(index, DraftSettings(), rows=rows, capacity=capacity).nbytes
        for rows, capacity in ((1, CAPACITY), (2, CAPACITY), (2, 2 * CAPACITY))
    ]
    assert sizes == sorted(sizes)
    assert sizes[2] - sizes[1] >= 2 * CAPACITY * 3 * 4
    assert np.diff(sizes).min() > 0
