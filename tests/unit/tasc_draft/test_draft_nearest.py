"""The rows found are those of greatest cosine, in order, and the scratch is left clean."""

from random import Random

import inputs_reference as reference
import numpy as np
from draft_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft.index.inputs import InputIndex
from tasc_draft.index.inputs_build import build_inputs
from tasc_draft.index.nearest import MAX_POSTINGS, NearestScratch, nearest, nearest_scratch
from tasc_draft.tokens import Tokens

few = examples(25, 60)
prompt = st.lists(st.integers(0, 15), max_size=8)
row = st.tuples(prompt, st.lists(st.integers(0, 2), max_size=4))
Found = list[tuple[int, float]]
TOPICS = [[i % 5, 10 + i % 3, 20 + i % 11] for i in range(60)]
LABELS = [[i % 5] for i in range(60)]


def build(prompts: list[list[int]], outputs: list[list[int]]) -> InputIndex:
    return build_inputs(
        Tokens.of(prompts), Tokens.of(outputs), np.arange(len(prompts), dtype=np.int32)
    )


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
@given(st.lists(row, max_size=30), prompt, st.integers(1, 8))
def test_the_rows_found_are_those_of_greatest_cosine(
    table: list[tuple[list[int], list[int]]], asked: list[int], k: int
) -> None:
    prompts, outputs = [p for p, _ in table], [o for _, o in table]
    found = search(build(prompts, outputs), asked, k)
    assert_greatest(found, reference.cosines(prompts, outputs, asked), k)


@few
@given(st.lists(prompt, min_size=1, max_size=6), st.integers(1, 9))
def test_one_scratch_serves_many_searches_and_is_clean_after_each(
    asked: list[list[int]], k: int
) -> None:
    index = build(TOPICS, LABELS)
    scratch = nearest_scratch(index)
    for one in asked:
        assert search(index, one, k, scratch) == search(index, one, k)
        assert not scratch.scores.any()
        assert not scratch.seen.any()


def test_of_equal_prompts_the_lower_rows_come_first() -> None:
    prompts = [[1, 2, 3] if i % 10 == 4 else [i, i + 1] for i in range(100, 200)]
    found = search(build(prompts, [[i] for i in range(100)]), [1, 2, 3], 6)
    assert [r for r, _ in found] == [4, 14, 24, 34, 44, 54]
    assert len({s for _, s in found}) == 1


def test_of_rows_alike_for_different_words_the_lower_come_first() -> None:
    found = search(build([[i % 6] for i in range(12)], [[1]] * 12), [5, 4, 3, 2, 1, 0], 7)
    assert [r for r, _ in found] == [0, 1, 2, 3, 4, 5, 6]
    assert len({s for _, s in found}) == 1


def test_a_row_with_the_same_features_is_wholly_alike() -> None:
    prompts = [TOPICS[i // 2] for i in range(60)]
    [(first, one), (second, two)] = search(build(prompts, LABELS), prompts[7], 2)
    assert (first, second) == (6, 7)
    np.testing.assert_allclose([one, two], 1, rtol=1e-6)


def test_unknown_tokens_make_every_row_less_alike_in_the_same_order() -> None:
    index = build(TOPICS, LABELS)
    known, more = search(index, [3, 11, 27], 9), search(index, [3, 11, 27, 999], 9)
    assert [r for r, _ in known] == [r for r, _ in more]
    assert all(b < a for (_, a), (_, b) in zip(known, more, strict=True))


def test_nothing_is_found_for_nothing() -> None:
    index = build(TOPICS, LABELS)
    assert search(index, [3, 11], 3)
    assert search(index, [], 3) == []
    assert search(index, [999, 998], 3) == []
    assert search(index, [3, 11], 0) == []
    assert search(build([], []), [3, 11], 3) == []


def test_only_the_end_of_a_long_prompt_counts() -> None:
    index, end = build(TOPICS, LABELS), [3, 11, 27] + [900] * 1021
    assert len(end) == 1024
    assert search(index, [4, *end], 9) == search(index, [3, 11, 27, 900, 900], 9) != []
    distinct = list(range(3000))
    assert search(index, distinct, 9) == search(index, distinct[-1024:], 9)
    assert search(index, [*distinct, *TOPICS[8]], 1)[0][0] == 8


def test_beyond_the_bound_the_rarest_features_decide() -> None:
    random = Random(1)
    prompts = [random.sample(range(500), 100) for _ in range(1100)]
    outputs = [[random.randrange(3)] for _ in prompts]
    index, asked = build(prompts, outputs), list(range(500))
    assert np.diff(index.first)[index.keys & 1 == 0].sum() > MAX_POSTINGS
    assert_greatest(search(index, asked, 32), reference.cosines(prompts, outputs, asked), 32)


def test_a_single_feature_beyond_the_bound_still_finds_rows() -> None:
    common = [[1] if i % 4 == 0 else [2 + i] for i in range(4 * MAX_POSTINGS + 8)]
    tokens, nothing = Tokens.of(common), Tokens.of([[]] * len(common))
    index = build_inputs(tokens, nothing, np.zeros(len(common), np.int32))
    assert [r for r, _ in search(index, [1], 3)] == [0, 4, 8]
