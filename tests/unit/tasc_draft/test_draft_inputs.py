"""The input index holds what its definition gives; the rows found are those of greatest cosine."""

from dataclasses import replace
from random import Random

import inputs_reference as reference
import numpy as np
import pytest
from draft_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from support import refused
from tasc_draft.errors import DraftError
from tasc_draft.index import inputs
from tasc_draft.index.inputs import (
    MAX_POSTINGS,
    InputIndex,
    InputView,
    NearestScratch,
    build_inputs,
    directory,
    find,
    nearest,
    nearest_scratch,
)
from tasc_draft.tokens import Tokens

few = examples(25, 60)
token = st.integers(0, 9)
# Outputs that share a long beginning, so that some agree up to where agreement is cut.
output = st.builds(
    lambda n, tail: [0] * n + tail, st.integers(0, 30), st.lists(st.integers(0, 2), max_size=2)
)
row = st.tuples(st.lists(token, max_size=8), output)
tables = st.lists(row, max_size=25)
# Tokens in one row, in some and in every row; pairs in one row and in two.
PROMPTS = [[i, 50 + i // 2, 90, 7] for i in range(10)]
OUTPUTS = [[i // 4, i // 2, i] for i in range(10)]


ARRAYS = InputView._fields


def build(prompts: list[list[int]], outputs: list[list[int]]) -> InputIndex:
    return build_inputs(
        Tokens.of(prompts), Tokens.of(outputs), np.arange(len(prompts), dtype=np.int32)
    )


def postings(index: InputIndex) -> dict[int, list[int]]:
    begins = index.first.tolist()
    return {
        key: index.postings[begins[f] : begins[f + 1]].tolist()
        for f, key in enumerate(index.keys.tolist())
    }


def assert_refused(index: InputIndex) -> None:
    with refused(DraftError, "input index"):
        index.check_integrity()


@few
@given(tables)
def test_every_feature_has_its_rows_and_there_are_no_others(
    table: list[tuple[list[int], list[int]]],
) -> None:
    prompts, outputs = [p for p, _ in table], [o for _, o in table]
    assert postings(build(prompts, outputs)) == reference.rows_of(prompts)


@few
@given(tables)
def test_weights_and_norms_follow_from_rarity_and_from_how_much_outputs_agree(
    table: list[tuple[list[int], list[int]]],
) -> None:
    prompts, outputs = [p for p, _ in table], [o for _, o in table]
    index = build(prompts, outputs)
    np.testing.assert_allclose(
        index.weights, list(reference.weights(prompts, outputs).values()), rtol=1e-5
    )
    np.testing.assert_allclose(index.norms, reference.norms(prompts, outputs), rtol=1e-5)


@few
@given(tables)
def test_what_is_built_is_sound_and_the_same_rows_give_the_same_bytes(
    table: list[tuple[list[int], list[int]]],
) -> None:
    prompts, outputs = [p for p, _ in table], [o for _, o in table]
    one, two = build(prompts, outputs), build(prompts, outputs)
    one.check_integrity()
    assert all(getattr(one, name).tobytes() == getattr(two, name).tobytes() for name in ARRAYS)
    assert one.nbytes == sum(array.nbytes for array in one.view)


def test_the_rows_used_here_have_features_of_every_kind() -> None:
    index = build(PROMPTS, OUTPUTS)
    sizes, pairs = np.diff(index.first), index.keys & 1 == 1
    assert {0, 1, 2} == set(sizes.tolist())
    assert {0, 2} == set(sizes[pairs].tolist())


def test_every_key_is_found_and_no_other() -> None:
    index = build(PROMPTS, OUTPUTS)
    near = {int(key) + step for key in index.keys for step in (-1, 0, 1)} | {0, 2**32 - 1}
    known = {key: f for f, key in enumerate(index.keys.tolist())}
    for key in near:
        assert find(index.slots, index.keys, np.uint32(key)) == known.get(key, -1)


def test_outputs_that_agree_make_a_word_weigh_more() -> None:
    prompts = [[i % 5, 10 + i % 5] for i in range(50)]
    told_apart = build(prompts, [[i % 5] for i in range(50)])
    at_random = build(prompts, [[i] for i in range(50)])
    assert (told_apart.weights > 2 * at_random.weights).all()


def test_only_the_end_of_a_long_prompt_counts() -> None:
    ends = [[i % 5] * 1024 for i in range(12)]
    outputs = [*OUTPUTS, [], []]
    short, long = build(ends, outputs), build([[99, *end] for end in ends], outputs)
    assert len(short.postings) > 0
    assert postings(short) == postings(long)


def test_different_numbers_of_rows_are_refused() -> None:
    with refused(DraftError, "2 prompts", "1 outputs"):
        build_inputs(Tokens.of([[1], [2]]), Tokens.of([[1]]), np.zeros(2, np.int32))


def test_more_postings_than_an_index_can_number_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "LARGEST_INDEX", 5)
    with refused(DraftError, "29", "5"):
        build(PROMPTS, OUTPUTS)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_cut_short_is_refused(name: str) -> None:
    index = build(PROMPTS, OUTPUTS)
    assert_refused(replace(index, **{name: getattr(index, name)[:-1].copy()}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, -5) for name in ARRAYS if name != "keys"),
        *((name, 1000) for name in ("slots", "first", "postings", "weights", "norms")),
    ],
)
def test_any_single_value_out_of_place_is_refused(name: str, value: int) -> None:
    index = build(PROMPTS, OUTPUTS)
    for place in range(len(getattr(index, name))):
        damaged = getattr(index, name).copy()
        damaged[place] = value
        assert_refused(replace(index, **{name: damaged}))


def test_keys_out_of_order_or_twice_are_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    for place in range(len(index.keys)):
        damaged = index.keys.copy()
        damaged[place] = damaged[place - 1]
        assert_refused(replace(index, keys=damaged))


def test_postings_that_do_not_ascend_are_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    pairs = [f for f, size in enumerate(np.diff(index.first)) if size == 2]
    assert pairs
    for f in pairs:
        swapped = index.postings.copy()
        swapped[index.first[f] : index.first[f + 1]] = swapped[index.first[f] :][:2][::-1]
        assert_refused(replace(index, postings=swapped))


def test_weights_that_are_no_numbers_are_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    for f in range(len(index.weights)):
        weights = index.weights.copy()
        weights[f] = np.nan
        assert_refused(replace(index, weights=weights))


def test_features_that_should_have_been_left_out_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = build(PROMPTS, OUTPUTS)
    single = np.diff(index.first) == 1
    assert single.any()
    assert_refused(replace(index, keys=np.where(single, index.keys | 1, index.keys)))
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "WIDEST_SHARE", 0.9)
        index = build([[i % 2, 5] for i in range(10)], OUTPUTS)
    assert_refused(index)


def test_a_directory_of_another_size_is_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    assert_refused(replace(index, slots=directory(index.keys, 3)))


def test_a_weight_too_small_to_square_is_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    weights = np.where(index.weights > 0, np.float32(1e-30), 0).astype(np.float32)
    assert_refused(replace(index, weights=weights, norms=np.zeros_like(index.norms)))


prompt = st.lists(st.integers(0, 15), max_size=8)
short_row = st.tuples(prompt, st.lists(st.integers(0, 2), max_size=4))
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
@given(st.lists(short_row, max_size=30), prompt, st.integers(1, 8))
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


def test_only_the_end_of_a_long_prompt_is_searched_by() -> None:
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
