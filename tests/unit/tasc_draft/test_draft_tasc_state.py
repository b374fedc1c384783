"""Proposers carry rows from step to step without one row, draft or index touching another."""

from collections.abc import Sequence

import pytest
from draft_reference import (
    VOCAB,
    Reference,
    guesses,
    ids,
    make_index,
    make_proposer,
    ngram_counts,
    propose,
    same,
)
from draft_strategies import answers, documents, drafting, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import CorpusIndex, DraftSettings, TascProposer

few = settings(deadline=None, max_examples=100)
parts = st.lists(answers, max_size=4)


def begun(
    index: CorpusIndex, setting: DraftSettings, prompt: Sequence[int], answer: Sequence[int]
) -> TascProposer:
    proposer = make_proposer(index, setting)
    proposer.start(0, ids(prompt))
    proposer.observe(0, ids(answer))
    return proposer


@few
@given(documents, drafting, prompts, parts)
def test_an_answer_observed_in_parts_equals_one_observed_at_once(
    documents: list[list[int]], setting: DraftSettings, prompt: list[int], parts: list[list[int]]
) -> None:
    index = make_index(documents)
    stepwise = make_proposer(index, setting)
    stepwise.start(0, ids(prompt))
    answer: list[int] = []
    for part in parts:
        propose(stepwise, 0)  # its draft stays behind in the row's memory
        stepwise.observe(0, ids(part))
        answer += part
        assert propose(stepwise, 0) == propose(begun(index, setting, prompt, answer), 0)


@few
@given(documents, drafting, prompts, answers)
def test_proposing_twice_gives_the_same_draft(
    documents: list[list[int]], setting: DraftSettings, prompt: list[int], answer: list[int]
) -> None:
    proposer = begun(make_index(documents), setting, prompt, answer)
    first = propose(proposer, 0)
    propose(proposer, 0, budget=1)
    assert propose(proposer, 0) == first


def test_a_rejected_draft_is_never_matched() -> None:
    """Prompt 1 2 1 drafts "2 1 2 ..."; the target says 3, and 3 is not said to follow the draft."""
    setting = DraftSettings(corpus_weight=0.0, min_prob=0.0, num_speculative_tokens=6)
    proposer = begun(make_index([]), setting, [1, 2, 1], [])
    assert [token for token, _, _ in propose(proposer, 0)] == [2, 1, 2, 1, 2, 1]
    proposer.observe(0, ids([3]))
    assert propose(proposer, 0) == []


@few
@given(documents, drafting, st.lists(st.tuples(prompts, answers), min_size=2, max_size=3))
def test_rows_do_not_touch_each_other(
    documents: list[list[int]], setting: DraftSettings, rows: list[tuple[list[int], list[int]]]
) -> None:
    index = make_index(documents)
    together = make_proposer(index, setting)
    for row, (prompt, _) in enumerate(rows):
        together.start(row, ids(prompt))
    every = ids(range(len(rows)))
    together.propose(every, ids([64] * len(rows)))
    for row, (_, answer) in enumerate(rows):
        together.observe(row, ids(answer))
    drafts = together.propose(every, ids([64] * len(rows)))
    for row, (prompt, answer) in enumerate(rows):
        assert guesses(drafts, row) == propose(begun(index, setting, prompt, answer), 0)


@few
@given(documents, drafting, prompts, answers, prompts, answers)
def test_a_finished_row_starts_again_without_a_past(
    documents: list[list[int]],
    setting: DraftSettings,
    old_prompt: list[int],
    old_answer: list[int],
    prompt: list[int],
    answer: list[int],
) -> None:
    index = make_index(documents)
    proposer = begun(index, setting, old_prompt, old_answer)
    propose(proposer, 0)
    proposer.finish(0)
    proposer.start(0, ids(prompt))
    proposer.observe(0, ids(answer))
    assert propose(proposer, 0) == propose(begun(index, setting, prompt, answer), 0)


@few
@given(documents, documents, drafting, prompts, answers, answers)
def test_a_new_index_in_mid_answer_equals_having_had_it_from_the_start(
    old: list[list[int]],
    new: list[list[int]],
    setting: DraftSettings,
    prompt: list[int],
    before: list[int],
    after: list[int],
) -> None:
    index = make_index(new, n_max=4)
    proposer = begun(make_index(old), setting, prompt, before)
    proposer.set_index(index)
    assert propose(proposer, 0) == propose(begun(index, setting, prompt, before), 0)
    proposer.observe(0, ids(after))
    assert propose(proposer, 0) == propose(begun(index, setting, prompt, before + after), 0)


def test_an_index_of_another_vocabulary_is_refused_and_the_old_one_stays() -> None:
    proposer = begun(make_index([[1, 2]]), DraftSettings(), [3], [1])
    before = propose(proposer, 0)
    with pytest.raises(ValueError, match=rf"vocabulary of 9.*{VOCAB}.*target's tokenizer"):
        proposer.set_index(CorpusIndex.empty("f", 9))
    assert propose(proposer, 0) == before != []


def test_a_row_in_use_cannot_be_started() -> None:
    proposer = begun(make_index([]), DraftSettings(), [3], [])
    with pytest.raises(ValueError, match="row 0 is in use; finish it"):
        proposer.start(0, ids([1]))
    proposer.finish(0)
    proposer.start(0, ids([1]))


@pytest.mark.parametrize("prompt_length", [0, 1, 16])
def test_a_row_can_be_filled_to_its_capacity(prompt_length: int) -> None:
    documents, setting = [[1, 2, 3, 4] * 3], DraftSettings(min_prob=0.0)
    proposer = make_proposer(make_index(documents), setting, rows=2, capacity=16)
    prompt, answer = [4, 3] * 8, [1, 2, 3, 4] * 4
    prompt, answer = prompt[:prompt_length], answer[: 16 - prompt_length]
    proposer.start(1, ids([2, 3]))
    neighbour = propose(proposer, 1)
    proposer.start(0, ids(prompt))
    for token in answer:
        proposer.observe(0, ids([token]))
    expected = Reference(setting, ngram_counts(documents, 6, 1)).draft(prompt, answer, 8)
    assert len(expected) > 2
    assert same(propose(proposer, 0), expected)
    assert propose(proposer, 1) == neighbour


def test_an_empty_prompt_drafts_from_the_document_mark() -> None:
    proposer = make_proposer(make_index([[1, 2]]), DraftSettings())
    proposer.start(0, ids([]))
    assert [token for token, _, _ in propose(proposer, 0)] == [1, 2, 0]
    assert propose(make_started(CorpusIndex.empty("f", VOCAB)), 0) == []


def make_started(index: CorpusIndex) -> TascProposer:
    proposer = make_proposer(index, DraftSettings())
    proposer.start(0, ids([]))
    return proposer
