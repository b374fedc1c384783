"""Tests that the aligned table counts next tokens by context like dictionaries of tuples."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from draft_cases import examples
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft.drafts import Tokens
from tasc_draft.index.aligned import (
    KINDS,
    MIN_ROWS,
    MIN_TOTALS,
    NO_RECORD,
    WIDEST,
    AlignedTable,
    build_aligned,
    context_keys,
    find,
    words,
)

# Even ids begin a word, odd ones go on with it; 18 is the end of an output.
VOCAB, EOS = 20, 18
STARTS = np.array([token % 2 == 0 for token in range(VOCAB)] + [True])
HEAD, TAIL = (4, 5, 6), (8, 9, 10)  # two words each

Row = tuple[list[int], list[int]]
Word = tuple[int, ...]


def build(rows: Sequence[Row], word_starts: np.ndarray = STARTS) -> AlignedTable | None:
    prompts, outputs = (Tokens.of([row[side] for row in rows]) for side in (0, 1))
    return build_aligned(prompts, outputs, word_starts=word_starts, vocab_size=VOCAB, eos_id=EOS)


def built(rows: Sequence[Row]) -> AlignedTable:
    table = build(rows)
    assert table is not None
    return table


def split(text: Sequence[int]) -> list[Word]:
    found: list[Word] = []
    for token in text:
        if not found or token % 2 == 0:
            found.append(())
        found[-1] += (token,)
    return found


def contexts(prompt: Sequence[int], output: Sequence[int], head: int) -> list[tuple[Word, ...]]:
    """Returns the contexts of the token after an output, as plain tuples by kind."""
    all_words = dict(enumerate(split(prompt)))
    u = head + len(split(output))
    before, at, after = (all_words.get(u + step, ()) for step in (-1, 0, 1))
    y1, y2 = ([-1, VOCAB, *output])[-1:], ([-1, VOCAB, *output])[-2:]
    return [
        (at, tuple(y1)),
        (at, tuple(y2)),
        (at, tuple(y1), after),
        (at[-1:], tuple(y2)),
        (before, at, tuple(y2)),
        (at[-1:], after[-1:], tuple(y2)),
    ]


def keys_of(prompt: Sequence[int], output: Sequence[int], head: int, room: int = 64) -> np.ndarray:
    hashes, lasts = np.zeros(room, np.uint32), np.zeros(room, np.int32)
    n = words(np.array(prompt, np.int32), STARTS, hashes, lasts)
    y2, y1 = ([-1, VOCAB, *output])[-2:]
    keys = np.zeros(KINDS, np.uint32)
    context_keys(hashes, lasts, n, head + len(split(output)), y1, y2, keys)
    return keys


def moments(rows: Sequence[Row]) -> list[tuple[list[int], list[int], int]]:
    """Prompt, output so far and next token, for each token of the rows' outputs."""
    return [
        (prompt, output[:n], [*output, EOS][n])
        for prompt, output in rows
        for n in range(len(output) + 1)
    ]


def record(table: AlignedTable, key: int) -> tuple[dict[int, int], int]:
    at = find(table.view, key)
    if at == NO_RECORD:
        return {}, 0
    run = slice(table.first[at], table.first[at + 1])
    found = dict(zip(table.tokens[run].tolist(), table.counts[run].tolist(), strict=True))
    return found, int(table.totals[at])


word = st.tuples(st.sampled_from([0, 2, 4]), st.lists(st.sampled_from([1, 3]), max_size=2))
tag = st.tuples(st.sampled_from([12, 14]), st.lists(st.just(13), max_size=1))
pair = st.tuples(word, tag)
tagged = st.lists(st.lists(pair, max_size=5), min_size=MIN_ROWS, max_size=MIN_ROWS + 10)
few = examples(15, 40)


def rendered(
    sentences: Sequence[Sequence[tuple[tuple[int, list[int]], ...]]], template: bool = True
) -> list[Row]:
    """Prompts, with a template's head and tail or bare, and outputs."""
    rows = []
    for sentence in sentences:
        sides = [
            [t for first, more in side for t in (first, *more)]
            for side in zip(*sentence, strict=True)
        ]
        rows.append(tuple(sides) or ([], []))
    # Inputs that begin otherwise, so that what most prompts begin with is the template's head.
    rows += [([token], [12]) for token in (0, 2)] * MIN_ROWS
    head, tail = (HEAD, TAIL) if template else ((), ())
    return [([*head, *prompt, *tail], output) for prompt, output in rows]


@few
@given(tagged, st.booleans())
def test_aligned_counts_equal_the_reference(sentences, template):
    rows = rendered(sentences, template)
    table = built(rows)
    head = 2 if template else 0
    assert table.head == head
    seen: defaultdict[tuple, Counter[int]] = defaultdict(Counter)
    keys: dict[tuple, int] = {}
    for prompt, output, token in moments(rows):
        found = keys_of(prompt, output, head)
        for kind, context in enumerate(contexts(prompt, output, head)):
            seen[kind, context][token] += 1
            keys[kind, context] = int(found[kind])
    expected: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for context, counts in seen.items():
        if counts.total() >= MIN_TOTALS[context[0]]:
            expected[keys[context]] += counts
    assert set(table.keys.tolist()) == set(expected)
    assert len(set(keys.values())) >= len(keys) - 1  # two of some thousand may share 32 bits
    for key in keys.values():
        counts = expected.get(key, Counter())
        found = record(table, key)
        assert found == (dict(counts), counts.total())
        assert list(found[0]) == sorted(found[0], key=lambda token: (-counts[token], token))


@few
@given(tagged, st.randoms(use_true_random=False))
def test_order_of_rows_changes_no_array_of_the_aligned_table(
    sentences: list[list], rng: Random
) -> None:
    rows = rendered(sentences)
    one, other = built(rows), built(rng.sample(rows, len(rows)))
    for left, right in zip(one.view, other.view, strict=True):
        np.testing.assert_array_equal(left, right)
    one.check_integrity()


@few
@given(st.lists(st.integers(0, VOCAB - 1), max_size=12), st.integers(0, 12))
def test_prompt_is_split_at_word_starts_into_a_limited_number_of_words(prompt, room):
    hashes, lasts = np.full(room + 9, 9, np.uint32), np.full(room + 9, -1, np.int32)
    n = words(np.array(prompt, np.int32), STARTS, hashes[:room], lasts[:room])
    expected = split(prompt)[:room]
    assert lasts[:n].tolist() == [w[-1] for w in expected]
    assert (lasts[n:] == -1).all()
    assert (hashes[n:] == 9).all()
    same = [[a == b for b in expected] for a in expected]
    assert [[bool(a == b) for b in hashes[:n]] for a in hashes[:n]] == same


def test_word_across_template_head_and_input_belongs_to_the_input() -> None:
    rows = [([4, 6, n, 0], [12, 14]) for n in (1, 3) * MIN_ROWS]
    assert built(rows).head == 1


def test_template_is_found_despite_a_few_different_rows() -> None:
    rows = [([4, 6, 2 * (n % 5), 8], [12]) for n in range(95)]
    for otherwise, head in ((5, 2), (15, 1)):
        assert built([*rows, *[([4, 2, 8], [12])] * otherwise]).head == head


def test_line_break_may_belong_to_the_word_before_it() -> None:
    rows = [([2 * (n % 3), 2 * (n % 4), (7, 8)[n % 2]], [12, 14]) for n in range(80)]
    assert {len(split(prompt)) - len(split(output)) for prompt, output in rows} == {0, 1}
    table = built(rows)
    joined, apart, without = (
        record(table, keys_of(prompt, [], 0)[0]) for prompt in ([0, 2, 7], [0, 2, 8], [0, 2])
    )
    assert (joined, without[1]) == (apart, 27)


def test_unaligned_rows_are_not_counted() -> None:
    good = [([n % 4, 2 + n % 2], [12, 14][: 2 - n % 2]) for n in range(10 * MIN_ROWS)]
    odd = [([0, 0, 0, 0], [12])] * MIN_ROWS
    mixed, pure = built([*good, *odd]), built(good)
    for left, right in zip(mixed.view, pure.view, strict=True):
        np.testing.assert_array_equal(left, right)
    assert build([*good, *odd, *odd]) is None


@pytest.mark.parametrize(
    ("rows", "aligns"),
    {
        "a tag a word": ([([n % 3, n % 2], [12, 14][: 2 - n % 2]) for n in range(50)], True),
        "too few rows": ([([0, 2], [12, 14])] * 49, False),
        "one label a text": ([([0] * (n % 7), [12]) for n in range(50)], False),
        "no rows": ([], False),
        "fewer words than the head has": ([([4, 6, 0], [12, 14])] * 50, False),
        "nothing but ends": ([([], [])] * 50, True),
    }.values(),
)
def test_only_word_by_word_tasks_have_an_aligned_table(rows: list[Row], aligns: bool) -> None:
    table = build(rows)
    assert (table is not None) == aligns
    if table is not None:
        table.check_integrity()


@pytest.mark.parametrize("room", [0, 1, 3, 64])
@pytest.mark.parametrize("output", [[12] * 3, [12] * 4, [12] * 500])
def test_answer_longer_than_the_prompt_reads_nothing_after_the_prompt(output, room):
    prompt = [0, 2, 4]
    clean = keys_of(prompt, output, 1, room)
    hashes, lasts = np.full(room + 8, 99, np.uint32), np.full(room + 8, 99, np.int32)
    n = words(np.array(prompt, np.int32), STARTS, hashes[4 : 4 + room], lasts[4 : 4 + room])
    found = np.zeros(KINDS, np.uint32)
    at = 1 + len(output)
    context_keys(hashes[4 : 4 + room], lasts[4 : 4 + room], n, at, 12, 12, found)
    assert found.tolist() == clean.tolist()


def test_only_frequent_continuations_are_kept() -> None:
    tags = [t for t in range(WIDEST + 2) for _ in range(t + 1 + MIN_ROWS)]
    table = built([([2 * (n % 2)], [tag]) for n, tag in enumerate(sorted(tags * 2))])
    found, total = record(table, keys_of([0], [], 0)[0])
    assert list(found) == list(range(WIDEST + 1, 1, -1))
    assert total == len(tags) > sum(found.values())
