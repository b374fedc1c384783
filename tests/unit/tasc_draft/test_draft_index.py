"""The flat trie holds exactly the n-grams that a dictionary of them holds."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from draft_reference import EOS, SEP, VOCAB, children_of, make_index, ngram_counts
from draft_strategies import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import CorpusIndex, DraftError, write_index
from tasc_draft.index import ARRAYS

DOCUMENTS = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [], [3, 1, 2]]
n_max = st.integers(1, 8)
p_min = st.integers(1, 3)
few = settings(deadline=None, max_examples=150)


def walk(index: CorpusIndex) -> dict[tuple[int, ...], int]:
    """The node of every n-gram, found by following children from the root."""
    nodes: dict[tuple[int, ...], int] = {(): 0}
    level = nodes
    while level:
        level = {
            (*gram, int(index.tokens[k])): k
            for gram, node in level.items()
            for k in range(index.first_child[node], index.first_child[node + 1])
        }
        nodes = nodes | level
    return nodes


@few
@given(documents, n_max, p_min)
def test_every_ngram_has_its_count_and_there_are_no_others(
    documents: list[list[int]], n_max: int, p_min: int
) -> None:
    index = make_index(documents, n_max, p_min)
    nodes = walk(index)
    assert len(nodes) == index.nodes
    counted = {gram: int(index.counts[node]) for gram, node in nodes.items()}
    assert counted == ngram_counts(documents, n_max, p_min)


@few
@given(documents, n_max, p_min)
def test_children_are_sorted_and_the_best_is_the_most_frequent_with_the_least_token(
    documents: list[list[int]], n_max: int, p_min: int
) -> None:
    index = make_index(documents, n_max, p_min)
    children = children_of(ngram_counts(documents, n_max, p_min))
    for gram, node in walk(index).items():
        run = index.tokens[index.first_child[node] : index.first_child[node + 1]].tolist()
        counts = children.get(gram, {})
        assert run == sorted(counts)
        usable = [t for t in counts if gram or t != SEP]
        best = min(usable, key=lambda t: (-counts[t], t), default=None)
        at = index.best_child[node]
        assert (None if at < 0 else index.tokens[at]) == best


def test_the_document_mark_is_never_the_best_token_of_all() -> None:
    index = make_index([[1], [2], [3]], eos_id=4)
    marks = int(index.counts[walk(index)[(SEP,)]])
    assert marks == 3 == index.counts[1:].max()
    assert index.tokens[index.best_child[0]] == 4

    only_marks = make_index([[], []], p_min=2, n_max=1)
    assert walk(only_marks).keys() == {(), (EOS,), (SEP,)}
    assert only_marks.tokens[only_marks.best_child[0]] == EOS


def test_ngrams_do_not_cross_documents() -> None:
    grams = walk(make_index([[1], [2]])).keys()
    assert (SEP, 1, EOS) in grams
    assert (SEP, 2, EOS) in grams
    assert not any(gram[:-1].count(EOS) or gram[1:].count(SEP) for gram in grams)


@few
@given(documents, st.randoms(use_true_random=False))
def test_the_order_of_documents_changes_no_array(documents: list[list[int]], rng: Random) -> None:
    shuffled = rng.sample(documents, len(documents))
    one, other = make_index(documents), make_index(shuffled)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_the_order_of_documents_changes_no_byte_of_the_file(tmp_path: Path) -> None:
    write_index(make_index(DOCUMENTS), tmp_path / "one")
    write_index(make_index(DOCUMENTS[::-1]), tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_an_empty_corpus_makes_an_index_of_the_root_only() -> None:
    index = CorpusIndex.empty("f", VOCAB)
    index.check_integrity()
    assert (index.nodes, index.counts.tolist(), index.best_child.tolist()) == (1, [0], [-1])
    assert index.first_child.tolist() == [1, 1]


def test_arrays_are_read_only_and_their_bytes_are_counted() -> None:
    index = make_index(DOCUMENTS)
    assert not any(getattr(index, name).flags.writeable for name in ARRAYS)
    assert index.nbytes == 4 * (4 * index.nodes + 1) > 100


@pytest.mark.parametrize("alien", [-1, VOCAB, VOCAB + 1])
def test_an_id_outside_the_vocabulary_is_refused_by_value(alien: int) -> None:
    with pytest.raises(DraftError, match=rf"{alien}.*vocabulary has {VOCAB}.*own tokenizer"):
        make_index([[1, 2], [alien]])


@pytest.mark.parametrize("alien", [-1, VOCAB, VOCAB + 1])
def test_an_end_of_sequence_id_outside_the_vocabulary_is_refused_by_value(alien: int) -> None:
    with pytest.raises(DraftError, match=rf"{alien}.*vocabulary has {VOCAB}.*eos_token_id"):
        make_index([[1, 2]], eos_id=alien)
