"""The input index holds the features, rows and weights that their definition gives."""

from dataclasses import replace

import inputs_reference as reference
import numpy as np
import pytest
from draft_examples import examples
from hypothesis import given
from hypothesis import strategies as st

from tasc_draft.errors import DraftError
from tasc_draft.index import inputs_build
from tasc_draft.index.inputs import ARRAYS, InputIndex, directory, find
from tasc_draft.index.inputs_build import build_inputs
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
    with pytest.raises(DraftError, match="build the index again"):
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
    with pytest.raises(DraftError, match="2 prompts, 1 outputs and 2 document"):
        build_inputs(Tokens.of([[1], [2]]), Tokens.of([[1]]), np.zeros(2, np.int32))


def test_more_postings_than_an_index_can_number_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs_build, "_LARGEST", 5)
    with pytest.raises(DraftError, match="an index holds 5"):
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
    monkeypatch.setattr(inputs_build, "WIDEST_SHARE", 0.9)
    assert_refused(build([[i % 2, 5] for i in range(10)], OUTPUTS))


def test_a_directory_of_another_size_is_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    assert_refused(replace(index, slots=directory(index.keys, 3)))


def test_a_weight_too_small_to_square_is_refused() -> None:
    index = build(PROMPTS, OUTPUTS)
    weights = np.where(index.weights > 0, np.float32(1e-30), 0).astype(np.float32)
    assert_refused(replace(index, weights=weights, norms=np.zeros_like(index.norms)))
