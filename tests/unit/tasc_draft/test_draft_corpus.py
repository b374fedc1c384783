"""Tests that the corpus index equals counts in plain Python, and that all n-grams are found."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from draft_cases import examples
from hypothesis import example, given
from hypothesis import strategies as st

from support import refused
from tasc_draft.drafts import DraftError, Tokens
from tasc_draft.index.corpus import CorpusIndex, CorpusView
from tasc_draft.index.corpus_build import Documents, assemble, check_cap, distinct, index_documents
from tasc_draft.index.corpus_sort import sort_part, splitters
from tasc_draft.index.lookup import COLUMNS, continuations, count, follow, narrow

END = -1
WIDEST = 8
EOS = 0

Gram = tuple[int, ...]
Outputs = Sequence[Sequence[int]]


def build(outputs: Outputs, vocab_size: int, **options: Any) -> CorpusIndex:
    return kept_of(outputs, vocab_size, **options)[0]


def marked(outputs: Outputs, sep: int) -> list[Gram]:
    return [(sep, *output, EOS) for output in outputs]


def gram_counts(outputs: Outputs, sep: int, depth: int) -> Counter[Gram]:
    """Returns the count of every gram of 1 to ``depth`` tokens."""
    return Counter(
        document[i : i + n]
        for document in marked(outputs, sep)
        for n in range(1, depth + 1)
        for i in range(len(document) - n + 1)
    )


def entries(outputs: Outputs, sep: int, depth: int) -> dict[Gram, int]:
    """Returns the counts of distinct grams of ``depth`` tokens, cut after END, sorted."""
    found = Counter(
        (*document, END)[i : i + depth]
        for document in marked(outputs, sep)
        for i in range(len(document))
    )
    return dict(sorted(found.items()))


def next_tokens(counts: Counter[Gram]) -> dict[Gram, list[tuple[int, int]]]:
    """The most frequent continuations of each context, as (token, count)."""
    followers: defaultdict[Gram, list[tuple[int, int]]] = defaultdict(list)
    for gram, times in counts.items():
        followers[gram[:-1]].append((gram[-1], times))
    return {
        context: sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:WIDEST]
        for context, pairs in followers.items()
    }


def skewed(seed: int, documents: int, vocab_size: int) -> list[list[int]]:
    """Outputs of frequent and rare tokens, some repeated, some alike, some empty."""
    random = Random(seed)
    outputs: list[list[int]] = [[]]
    for _ in range(documents):
        if random.random() < 0.3:
            output = list(random.choice(outputs))
            output[random.randrange(len(output) + 1) :] = []
        else:
            output = []
        for _ in range(random.randrange(8)):
            output.append(min(int(random.paretovariate(0.7)), vocab_size - 1))
        outputs += [output] * random.choice([1, 1, 1, 4])
    return outputs


ARRAYS = tuple(CorpusIndex.empty("", 1).arrays)


def assert_same(a: CorpusIndex, b: CorpusIndex) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert (a.documents, a.tokens, a.depth) == (b.documents, b.tokens, b.depth)


VOCAB = 4
SMALL = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=7), max_size=9)
DEPTHS = st.integers(2, 7)


def grams_at(index: CorpusIndex, places: list[int]) -> list[Gram]:
    text = index.text.tolist()
    found = []
    for place in places:
        gram = tuple(text[place : place + index.depth])
        found.append(gram[: gram.index(END) + 1] if END in gram else gram)
    return found


def assert_counted(index: CorpusIndex, outputs: Outputs) -> None:
    sep, depth = index.vocab_size, index.depth
    documents = sorted({(*document, END) for document in marked(outputs, sep)})
    text = [token for document in documents for token in document]
    assert index.text.tolist() == text + [END] * depth
    assert np.diff(index.offsets).tolist() == [len(document) for document in documents]
    expected = entries(outputs, sep, depth)
    assert grams_at(index, index.order.tolist()) == list(expected)
    assert np.diff(index.cumulative).tolist() == list(expected.values())
    places = [i for i, token in enumerate(text) if token != END]
    first = dict(zip(reversed(grams_at(index, places)), reversed(places), strict=True))
    assert index.order.tolist() == [first[gram] for gram in expected]
    assert index.documents == len(outputs)
    assert index.tokens == sum(expected.values()) == sum(len(o) + 2 for o in outputs)


def documents_of(
    outputs: Outputs, vocab_size: int, eos_id: int = EOS, depth: int = 16
) -> Documents:
    return distinct(Tokens.of(outputs), vocab_size=vocab_size, eos_id=eos_id, depth=depth)


def sorted_in_parts(some: Documents, cuts: list[int]) -> list[Any]:
    return [
        sort_part(some.text, some.offsets, some.counts, 16, low, high)
        for low, high in pairwise([None, *cuts, None])
    ]


def assert_same_in_parts(outputs: Outputs, cuts: list[int], vocab_size: int) -> None:
    documents = documents_of(outputs, vocab_size)
    parts = sorted_in_parts(documents, cuts)
    index = assemble(documents, parts, fingerprint="f", vocab_size=vocab_size)
    assert_same(index, build(outputs, vocab_size))


def kept_of(
    outputs: Outputs, vocab_size: int, eos_id: int = EOS, depth: int = 16, **options: Any
) -> tuple[CorpusIndex, Documents]:
    documents = documents_of(outputs, vocab_size, eos_id, depth)
    options |= {"fingerprint": "f", "vocab_size": vocab_size, "depth": depth}
    return index_documents(documents, **options)


@examples(60, 100)
@given(SMALL, DEPTHS, st.integers(300, 600))
@example([], 2, 300)
@example([[]], 2, 300)
@example([[], [], []], 3, 300)
@example([[1] * 40], 3, 600)
@example([[1, 2, 3]] * 50, 5, 600)
@example([[1, 2] * 60] * 70 + [[1, 2] * 60 + [3]] * 2 + [[3] * 200], 16, 600)
def test_index_of_a_small_corpus_has_the_count_of_every_gram(
    outputs: Outputs, depth: int, cap: int
):
    index = build(outputs, VOCAB, depth=depth)
    assert_counted(index, outputs)
    assert_found(index, outputs)
    for each in (index, build(outputs, VOCAB, depth=depth, max_bytes=cap)):
        each.check_integrity()


@pytest.mark.parametrize("vocab_size", [30, 100_000, 2**21 - 3])
@pytest.mark.parametrize("depth", [6, 16])
def test_many_documents_with_distant_ids_are_counted(vocab_size: int, depth: int) -> None:
    step = vocab_size // 30
    outputs = [[token * step for token in output] for output in skewed(7, 400, 30)]
    index = build(outputs, vocab_size, depth=depth)
    assert len(index.order) > 1000
    assert_counted(index, outputs)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("outputs", [skewed(5, 120, 40), [[1] * 90] * 9, [[2]], []])
def test_number_of_sort_parts_changes_no_byte_of_the_index(outputs: Outputs, parts: int) -> None:
    cuts = splitters(documents_of(outputs, 40).text, parts)
    assert len(cuts) <= parts - 1
    assert_same_in_parts(outputs, cuts, 40)


@examples(35, 100)
@given(SMALL.filter(bool), st.lists(st.integers(0, 10**6), max_size=4))
def test_place_of_splitters_changes_no_byte_of_the_index(
    outputs: Outputs, drawn: list[int]
) -> None:
    order = build(outputs, VOCAB).order
    cuts = [int(order[entry]) for entry in sorted(number % len(order) for number in drawn)]
    assert_same_in_parts(outputs, cuts, VOCAB)


def test_splitters_make_parts_of_similar_size() -> None:
    documents = documents_of(skewed(11, 800, 100), 100)
    ones = replace(documents, counts=np.ones_like(documents.counts))
    sizes = [part[1].sum() for part in sorted_in_parts(ones, splitters(documents.text, 4))]
    assert max(sizes) < 1.5 * sum(sizes) / 4


@examples(35, 100)
@given(SMALL)
def test_each_row_refers_to_the_document_of_its_output(outputs: Outputs) -> None:
    documents = documents_of(outputs, VOCAB)
    text, offsets = documents.text.tolist(), documents.offsets.tolist()
    read = [text[offsets[d] : offsets[d + 1]] for d in documents.rows.tolist()]
    assert read == [[VOCAB, *output, EOS, END] for output in outputs]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 1.0])
def test_byte_limit_keeps_whole_documents(share: float) -> None:
    outputs, pruned_sizes = skewed(4, 300, 50), []
    cap = int(build(outputs, 50).nbytes * share)
    index, kept = kept_of(outputs, 50, max_bytes=cap, pruned=pruned_sizes.append)
    rest = [output for output, row in zip(outputs, kept.rows, strict=True) if row >= 0]
    assert 0.7 * cap < index.nbytes <= cap
    assert_same(index, build(rest, 50))
    assert_same(index, build(outputs[::-1], 50, max_bytes=cap))
    assert (len(rest) == len(outputs)) == (pruned_sizes == []) == (share == 1.0)


@pytest.mark.parametrize("parts", [1, 3])
def test_byte_limit_result_does_not_depend_on_the_sorter(parts: int) -> None:
    outputs, sorted_sizes, pruned_sizes = skewed(4, 300, 50), [], []

    def sort(some: Documents) -> list[Any]:
        sorted_sizes.append(len(some.counts))
        return sorted_in_parts(some, splitters(some.text, parts))

    cap = build(outputs, 50).nbytes // 3
    expected, kept = kept_of(outputs, 50, max_bytes=cap)
    found = kept_of(outputs, 50, max_bytes=cap, sort=sort, pruned=pruned_sizes.append)
    assert_same(found[0], expected)
    assert np.array_equal(found[1].rows, kept.rows)
    assert pruned_sizes == list(range(len(sorted_sizes)))
    assert sorted_sizes[0] > sorted_sizes[-1] == len(kept.counts)


def test_byte_limit_below_the_empty_index_is_refused() -> None:
    check_cap(None)
    check_cap(CorpusIndex.empty("f", VOCAB).nbytes)
    with refused(DraftError, "max_bytes is 87", "88"):
        check_cap(87)


def test_documents_without_repeated_grams_are_dropped_first() -> None:
    alike = [[1, 2, 3, 4, 5, 6, 7, 8, 9, last] for last in range(10, 20)]
    outputs = [*alike, list(range(20, 30))]
    _, kept = kept_of(outputs, 30, max_bytes=build(outputs, 30).nbytes - 1)
    assert kept.rows[-1] == -1
    assert (kept.rows[:-1] >= 0).any()


def test_byte_limit_keeps_documents_of_each_kind() -> None:
    outputs = [[*range(1, 30), last] for last in range(60, 70)]
    outputs += [[*range(30, 59), last] for last in range(60, 63)]
    _, kept = kept_of(outputs, 70, max_bytes=build(outputs, 70).nbytes // 2)
    assert (kept.rows[:10] >= 0).any()
    assert (kept.rows[10:] >= 0).any()
    assert (kept.rows[:10] < 0).any()


@pytest.mark.parametrize(
    ("outputs", "wrong", "named"),
    [
        ([[4]], {}, ["ids", "4"]),
        ([[-1]], {}, ["ids", "-1"]),
        ([[1]], {"eos_id": 4}, ["end-of-sequence", "4"]),
        ([[1]], {"vocab_size": 2**21 - 2}, ["vocab_size", str(2**21 - 2)]),
        ([[1]], {"max_bytes": 87}, ["max_bytes is 87"]),
        ([[1]], {"depth": 1}, ["depth is 1,"]),
        ([[1]], {"depth": 64}, ["depth is 64"]),
    ],
)
def test_invalid_documents_are_refused(outputs, wrong, named):
    with refused(DraftError, *named):
        build(outputs, **{"vocab_size": VOCAB} | wrong)


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
    view, counts = index.view, gram_counts(outputs, index.vocab_size, index.depth)
    follows = next_tokens(counts)
    for gram, expected in counts.items():
        *context, token = gram
        found = interval(view, gram)
        assert count(view, *found) == expected
        known = interval(view, tuple(context))
        assert follow(view, *known, len(context), token) == (*found, expected)
        if len(gram) < index.depth:
            assert next_of(view, gram) == follows.get(gram, [])
    assert next_of(view, ()) == follows.get((), [])


def test_every_gram_is_found_in_the_hot_table_or_by_search() -> None:
    index = build(BIG, 60, depth=DEPTH)
    assert len(index.hot_next) > 5 * WIDEST
    assert_found(index, BIG)
    assert_found(replace(index, hot_slots=np.zeros((1, 4), np.int32)), BIG)


def test_absent_grams_have_empty_intervals() -> None:
    view, known = build(BIG, 60, depth=DEPTH).view, gram_counts(BIG, 60, DEPTH)
    random, grams, absent = Random(0), list(known), 0
    for _ in range(2000):
        gram = (*random.choice(grams)[: DEPTH - 1], random.randrange(62))
        if gram not in known:
            absent += 1
            assert (interval(view, gram), next_of(view, gram)) == ((0, 0), [])
            last = interval(view, gram[:-1])
            assert follow(view, *last, len(gram) - 1, gram[-1]) == (0, 0, 0)
    assert absent > 200


@pytest.mark.parametrize("depth", [2, 16, 63])
def test_empty_index_finds_nothing(depth: int) -> None:
    empty = CorpusIndex.empty("f", VOCAB, depth)
    empty.check_integrity()
    assert_same(build([], VOCAB, depth=depth), empty)
    for gram in ((), (0,), (VOCAB,), (1, 2)):
        assert (interval(empty.view, gram), next_of(empty.view, gram)) == ((0, 0), [])
    assert count(empty.view, 0, 0) == 0
