"""Every context of a corpus is found with its count and its most frequent continuations."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from corpus_reference import WIDEST, Gram, Outputs, build, gram_counts, next_tokens, skewed
from draft_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft.index.corpus import CorpusIndex, CorpusView
from tasc_draft.index.lookup import COLUMNS, continuations, count, follow, narrow

VOCAB = 5
SMALL = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=7), max_size=9)
BIG = skewed(1, 700, 60)
DEPTH = 6


def interval(view: CorpusView, gram: Gram) -> tuple[int, int]:
    lo, hi = 0, len(view.order)
    for depth, token in enumerate(gram):
        lo, hi = narrow(view, lo, hi, depth, token)
    return lo, hi


def next_of(view: CorpusView, gram: Gram) -> list[tuple[int, int]]:
    found = np.zeros((WIDEST, COLUMNS), np.int32)
    n = continuations(view, *interval(view, gram), len(gram), found)
    for token, _, lo, hi in found[:n].tolist():
        assert (lo, hi) == interval(view, (*gram, token))
    return [(token, occurs) for token, occurs, _, _ in found[:n].tolist()]


def assert_found(index: CorpusIndex, outputs: Outputs) -> None:
    counts = gram_counts(outputs, index.vocab_size, index.depth)
    follows = next_tokens(counts)
    for gram, expected in counts.items():
        assert count(index.view, *interval(index.view, gram)) == expected
        if len(gram) < index.depth:
            assert next_of(index.view, gram) == follows.get(gram, [])
    assert next_of(index.view, ()) == follows.get((), [])


@examples(35, 100)
@given(SMALL, st.integers(2, 7))
def test_every_gram_of_small_corpora_is_found(outputs: Outputs, depth: int) -> None:
    assert_found(build(outputs, VOCAB, depth=depth), outputs)


def test_every_gram_of_a_corpus_with_big_intervals_is_found() -> None:
    index = build(BIG, 60, depth=DEPTH)
    assert len(index.hot_next) > 5 * WIDEST
    assert_found(index, BIG)


def test_grams_that_do_not_occur_are_empty_intervals() -> None:
    view, known = build(BIG, 60, depth=DEPTH).view, gram_counts(BIG, 60, DEPTH)
    random, grams, absent = Random(0), list(known), 0
    for _ in range(2000):
        gram = (*random.choice(grams)[: DEPTH - 1], random.randrange(62))
        if gram not in known:
            absent += 1
            assert interval(view, gram) == (0, 0)
            assert next_of(view, gram) == []
    assert absent > 200


def test_following_a_token_is_narrowing_and_counting() -> None:
    view = build(BIG, 60, depth=DEPTH).view
    for gram in gram_counts(BIG, 60, DEPTH - 1):
        lo, hi = interval(view, gram)
        for token in (0, 1, 7, 33, 61):
            narrowed = narrow(view, lo, hi, len(gram), token)
            assert follow(view, lo, hi, len(gram), token) == (*narrowed, count(view, *narrowed))


def test_the_hot_table_says_what_a_walk_of_the_entries_says() -> None:
    index = build(BIG, 60, depth=DEPTH)
    bare = replace(index, hot_slots=np.zeros((1, 4), np.int32))
    contexts = list(gram_counts(BIG, 60, DEPTH - 1))
    assert [next_of(index.view, c) for c in contexts] == [next_of(bare.view, c) for c in contexts]


@pytest.mark.parametrize("gram", [(), (0,), (VOCAB,), (1, 2)])
def test_an_empty_index_finds_nothing(gram: Gram) -> None:
    view = CorpusIndex.empty("f", VOCAB).view
    assert interval(view, gram) == (0, 0)
    assert next_of(view, gram) == []
    assert count(view, 0, 0) == 0
