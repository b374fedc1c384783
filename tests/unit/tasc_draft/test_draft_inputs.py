"""Tests that the input index equals its definition, and finds the rows of maximum cosine."""

from collections import defaultdict
from itertools import pairwise
from math import log, sqrt
from random import Random
from typing import Any

import numpy as np
from draft_cases import examples
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_draft.drafts import DraftError, Tokens
from tasc_draft.index import inputs
from tasc_draft.index.inputs import (
    MAX_POSTINGS,
    InputIndex,
    InputView,
    NearestScratch,
    build_inputs,
    nearest,
    nearest_scratch,
)

# The inverted index and the search in plain Python, by definition and slowly.
WINDOW, PAIRS, CORPUS_PAIRS, LEAST, LAST, BOUND = 24, 16, 4096, 0.01, 1024, 100_000
FULL = 2**64 - 1
MIX, SECOND, FINAL = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9

Prompt = list[int]


def features(prompt: Prompt) -> set[int]:
    """Even keys for tokens, odd ones for pairs, of the prompt's end."""
    prompt = prompt[-LAST:]
    tokens = {max((t + 1) * MIX % 2**64 >> 33, 1) << 1 for t in prompt}
    pairs = {
        ((((a + 1) * MIX % 2**64) ^ ((b + 7) * SECOND % 2**64)) * MIX % 2**64 >> 33) << 1 | 1
        for a, b in pairwise(prompt)
    }
    return tokens | pairs


def rows_of(prompts: list[Prompt]) -> dict[int, list[int]]:
    """Returns the rows of every kept feature; a feature in too many rows has none."""
    rows = defaultdict(list)
    for row, prompt in enumerate(prompts):
        for key in features(prompt):
            rows[key].append(row)
    wide = {key: len(having) > 0.3 * len(prompts) for key, having in rows.items()}
    return {
        key: [] if wide[key] else having
        for key, having in sorted(rows.items())
        if wide[key] or len(having) > 1 or key % 2 == 0
    }


def draw(seed: int, number: int, size: int) -> tuple[int, int]:
    x = (seed + number + 1) * MIX & FULL
    x = (x ^ (x >> 30)) * FINAL & FULL
    x ^= x >> 31
    a, b = (x >> 32) * size >> 32, (x & 0xFFFFFFFF) * (size - 1) >> 32
    return a, (a + 1 + b) % size


def agreement(a: Prompt, b: Prompt) -> float:
    ended = [[*a, -1][:WINDOW], [*b, -1][:WINDOW]]
    common = 0
    for x, y in zip(*ended, strict=False):
        if x != y:
            break
        common += 1
    return common / max(map(len, ended))


def purities(kept: dict[int, list[int]], outputs: list[Prompt]) -> dict[int, float]:
    shared, n = LEAST, len(outputs)
    if n > 1:
        pairs = [draw(0, i, n) for i in range(CORPUS_PAIRS)]
        shared = sum(agreement(outputs[a], outputs[b]) for a, b in pairs) / CORPUS_PAIRS
    found = {}
    for key, rows in kept.items():
        size = len(rows)
        if size < 2:
            continue
        pairs = [draw(key << 32, i, size) for i in range(min(size * (size - 1) // 2, PAIRS))]
        agreed = sum(agreement(outputs[rows[a]], outputs[rows[b]]) for a, b in pairs)
        found[key] = max((agreed + shared) / (len(pairs) + 1), LEAST)
    mean = sum(found.values()) / len(found) if found else max(shared, LEAST)
    return {key: found.get(key, mean) for key in kept}


def weights(prompts: list[Prompt], outputs: list[Prompt]) -> dict[int, float]:
    kept = rows_of(prompts)
    purity = purities(kept, outputs)
    return {
        key: log(len(prompts) / len(rows)) * sqrt(purity[key]) if rows else 0.0
        for key, rows in kept.items()
    }


def norms(prompts: list[Prompt], outputs: list[Prompt]) -> list[float]:
    return _norms(prompts, weights(prompts, outputs))


def _norms(prompts: list[Prompt], weight: dict[int, float]) -> list[float]:
    return [sqrt(sum(weight.get(key, 0) ** 2 for key in features(p))) for p in prompts]


def cosines(prompts: list[Prompt], outputs: list[Prompt], prompt: Prompt) -> dict[int, float]:
    """Returns the cosine of rows that share a feature; only the rarest features, up to a bound."""
    kept, weight, asked = rows_of(prompts), weights(prompts, outputs), features(prompt)
    unknown = 0.3 * log(max(len(prompts), 1)) ** 2
    square = sum(weight[key] ** 2 if key in weight else unknown for key in asked)
    scores: defaultdict[int, float] = defaultdict(float)
    looked_at = 0
    for key in sorted(asked & {k for k in kept if kept[k]}, key=lambda key: (len(kept[key]), key)):
        looked_at += len(kept[key])
        if looked_at > BOUND:
            break
        for row in kept[key]:
            scores[row] += weight[key] ** 2
    length = _norms(prompts, weight)
    return {row: score / (length[row] * sqrt(square)) for row, score in scores.items()}


few = examples(25, 60)
# Outputs that share a long beginning, so that some agree up to where agreement is cut.
output = st.builds(
    lambda n, tail: [0] * n + tail, st.integers(0, 30), st.lists(st.integers(0, 2), max_size=2)
)
Texts = list[list[int]]
Table = tuple[Texts, Texts]


def tables(token: st.SearchStrategy[int], output: st.SearchStrategy[list[int]]) -> Any:
    """Prompts, and as many outputs."""
    rows = st.lists(st.tuples(st.lists(token, max_size=8), output), max_size=30)
    return rows.map(lambda table: ([p for p, _ in table], [o for _, o in table]))


# Tokens in one row, in some and in every row; pairs in one row and in two.
PROMPTS = [[i, 50 + i // 2, 90, 7] for i in range(10)]
OUTPUTS = [[i // 4, i // 2, i] for i in range(10)]


ARRAYS = InputView._fields


def build(prompts: Texts, outputs: Texts) -> InputIndex:
    documents = np.arange(len(prompts), dtype=np.int32)
    return build_inputs(Tokens.of(prompts), Tokens.of(outputs), documents)


def postings(index: InputIndex) -> dict[int, list[int]]:
    begins = index.first.tolist()
    return {
        key: index.postings[begins[f] : begins[f + 1]].tolist()
        for f, key in enumerate(index.keys.tolist())
    }


@few
@given(tables(st.integers(0, 9), output))
def test_features_weights_and_norms_equal_the_definition(table: Table) -> None:
    """Weights follow from rarity and from how much outputs agree."""
    index, again = build(*table), build(*table)
    assert postings(index) == rows_of(table[0])
    np.testing.assert_allclose(index.weights, [*weights(*table).values()], rtol=1e-5)
    np.testing.assert_allclose(index.norms, norms(*table), rtol=1e-5)
    index.check_integrity()
    assert all(getattr(index, a).tobytes() == getattr(again, a).tobytes() for a in ARRAYS)


def test_only_the_last_tokens_of_a_long_prompt_are_indexed() -> None:
    ends = [[i % 5] * 1024 for i in range(10)]
    short, long = build(ends, OUTPUTS), build([[99, *end] for end in ends], OUTPUTS)
    assert len(short.postings) > 0
    assert postings(short) == postings(long)


def test_too_many_postings_are_refused(monkeypatch):
    monkeypatch.setattr(inputs, "LARGEST_INDEX", 5)
    with refused(DraftError, "29", "5"):
        build(PROMPTS, OUTPUTS)


prompt = st.lists(st.integers(0, 15), max_size=8)
short = st.lists(st.integers(0, 2), max_size=4)
Found = list[tuple[int, float]]
TOPICS = [[i % 5, 10 + i % 3, 20 + i % 11] for i in range(60)]
LABELS = [[i % 5] for i in range(60)]


def search(
    index: InputIndex, prompt: list[int], k: int, scratch: NearestScratch | None = None
) -> Found:
    found, similarity = np.full(k, -1, np.int32), np.full(k, np.nan, np.float32)
    scratch = scratch or nearest_scratch(index)
    n = nearest(index.view, np.array(prompt, np.int32), scratch, found, similarity)
    return list(zip(found[:n].tolist(), similarity[:n].tolist(), strict=True))


def assert_greatest(found: Found, cosines: dict[int, float], k: int) -> None:
    assert len(found) == min(k, len(cosines))
    assert found == sorted(found, key=lambda one: (-one[1], one[0]))
    np.testing.assert_allclose([s for _, s in found], [cosines[r] for r, _ in found], rtol=1e-5)
    left_out = set(cosines) - {r for r, _ in found}
    if left_out and found:
        assert max(cosines[r] for r in left_out) <= found[-1][1] * (1 + 1e-5)


@few
@given(tables(st.integers(0, 15), short), prompt, st.integers(0, 8))
def test_rows_of_greatest_cosine_are_found(table: Table, asked: Any, k: int) -> None:
    assert_greatest(search(build(*table), asked, k), cosines(*table, asked), k)


@few
@given(st.lists(prompt, min_size=1, max_size=6), st.integers(1, 9))
def test_search_scratch_is_clean_after_each_search(asked: Texts, k: int) -> None:
    index = build(TOPICS, LABELS)
    scratch = nearest_scratch(index)
    for one in asked:
        assert search(index, one, k, scratch) == search(index, one, k)
        assert not scratch.scores.any()
        assert not scratch.seen.any()


def test_equally_similar_rows_come_in_order() -> None:
    found = search(build([[i % 6] for i in range(12)], [[1]] * 12), [5, 4, 3, 2, 1, 0], 7)
    assert ([r for r, _ in found], len({s for _, s in found})) == ([*range(7)], 1)


def test_only_the_last_tokens_of_a_long_prompt_are_searched() -> None:
    index, end = build(TOPICS, LABELS), [3, 11, 27] + [900] * 1021
    assert len(end) == 1024
    assert search(index, [4, *end], 9) == search(index, [3, 11, 27, 900, 900], 9) != []
    distinct = list(range(3000))
    assert search(index, distinct, 9) == search(index, distinct[-1024:], 9)
    assert search(index, [*distinct, *TOPICS[8]], 1)[0][0] == 8


def test_only_the_rarest_features_are_searched_beyond_the_bound_of_postings() -> None:
    random = Random(1)
    prompts = [random.sample(range(500), 100) for _ in range(1100)]
    outputs = [[random.randrange(3)] for _ in prompts]
    index, asked = build(prompts, outputs), list(range(500))
    assert np.diff(index.first)[index.keys & 1 == 0].sum() > MAX_POSTINGS
    assert_greatest(search(index, asked, 32), cosines(prompts, outputs, asked), 32)


def test_search_by_one_feature_finds_rows_if_it_has_more_than_max_postings() -> None:
    common = [[1] if i % 4 == 0 else [2 + i] for i in range(4 * MAX_POSTINGS + 8)]
    tokens, nothing = Tokens.of(common), Tokens.of([[]] * len(common))
    index = build_inputs(tokens, nothing, np.zeros(len(common), np.int32))
    assert [r for r, _ in search(index, [1], 3)] == [0, 4, 8]
