"""A whole corpus index passes its check; one with a wrong element does not."""

from dataclasses import replace

import numpy as np
import pytest
from corpus_reference import Outputs, build, skewed
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft.errors import DraftError
from tasc_draft.index.corpus import ARRAYS, CorpusIndex

WHOLE = build(skewed(6, 150, 40), 40, depth=6)
PLACE = st.floats(0, 1, exclude_max=True)


def assert_refused(index: CorpusIndex) -> None:
    with pytest.raises(DraftError, match="damaged in its .*; build the index again"):
        index.check_integrity()


@settings(deadline=None)  # the first example compiles
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=7), max_size=9),
    st.integers(2, 7),
    st.none() | st.integers(300, 600),
)
def test_every_built_index_passes(outputs: Outputs, depth: int, cap: int | None) -> None:
    build(outputs, 4, depth=depth, max_bytes=cap).check_integrity()


@pytest.mark.parametrize("depth", [2, 16, 63])
def test_the_empty_index_passes(depth: int) -> None:
    CorpusIndex.empty("f", 4, depth).check_integrity()


def with_a_wrong_element(name: str, where: float, bits: int) -> CorpusIndex:
    array = getattr(WHOLE, name).copy()
    flat = array.reshape(-1)
    flat[int(where * len(flat))] ^= bits
    return replace(WHOLE, **{name: array})


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "text"])
@settings(deadline=None)
@given(PLACE, st.sampled_from([1, -1, 2**20, -(2**31)]))
def test_one_wrong_element_is_found(name: str, where: float, bits: int) -> None:
    assert_refused(with_a_wrong_element(name, where, bits))


@settings(deadline=None)
@given(PLACE, st.sampled_from([2**6, 2**20, -(2**31)]))
def test_one_token_outside_the_vocabulary_is_found(where: float, bits: int) -> None:
    assert_refused(with_a_wrong_element("text", where, bits))


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_wrong_length_or_type_are_found(name: str) -> None:
    array = getattr(WHOLE, name)
    assert len(array) > 1
    for wrong in (array[:-1], array[:0], array[:, None], array.astype(np.int64)):
        assert_refused(replace(WHOLE, **{name: wrong.copy()}))


@pytest.mark.parametrize("name", ["documents", "tokens", "depth", "vocab_size"])
@pytest.mark.parametrize("by", [-1, 1, 10**6, -(10**6)])
def test_wrong_numbers_are_found(name: str, by: int) -> None:
    assert_refused(replace(WHOLE, **{name: getattr(WHOLE, name) + by}))


def test_two_documents_in_the_wrong_order_are_found() -> None:
    text, ends = WHOLE.text.copy(), WHOLE.offsets[2:5]
    text[ends[0] : ends[2]] = np.roll(text[ends[0] : ends[2]], ends[2] - ends[1])
    offsets = WHOLE.offsets.copy()
    offsets[3] = ends[0] + ends[2] - ends[1]
    assert_refused(replace(WHOLE, text=text, offsets=offsets))


def test_a_missing_entry_is_found() -> None:
    order, cumulative = np.delete(WHOLE.order, 40), np.delete(WHOLE.cumulative, 40)
    assert_refused(replace(WHOLE, order=order, cumulative=cumulative))
