"""check_integrity passes on what was built and notices each way of not being a trie."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from draft_reference import SEP, VOCAB, make_index
from draft_strategies import documents
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import CorpusIndex, DraftError
from tasc_draft.index import ARRAYS

# Root: 0 x3, 1 x3, 2 x3, 3 x2, 4 x1, SEP x3. The node of (1, 2) has the children 3 x2 and 4 x1.
DOCUMENTS = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
SIZE = 3


def trie() -> dict[str, np.ndarray]:
    index = make_index(DOCUMENTS, SIZE)
    return {name: getattr(index, name).copy() for name in ARRAYS}


def rebuilt(arrays: dict[str, np.ndarray]) -> CorpusIndex:
    return replace(make_index(DOCUMENTS, SIZE), **arrays)


def put(name: str, place: int, value: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        assert arrays[name][place] != value
        arrays[name][place] = value

    return change


def cut(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name][:-1].copy()

    return change


def empty(arrays: dict[str, np.ndarray]) -> None:
    arrays.update({name: np.zeros(0, np.int32) for name in ARRAYS})


def swap_children(arrays: dict[str, np.ndarray]) -> None:
    arrays["tokens"][[1, 2]] = arrays["tokens"][[2, 1]]


def worse_child(arrays: dict[str, np.ndarray]) -> None:
    """The best child of (1, 2): 4 instead of 3, which is twice as frequent."""
    first, best = arrays["first_child"], arrays["best_child"]
    node = next(k for k in range(1, len(best)) if arrays["tokens"][best[k]] == 3)
    assert arrays["counts"][best[node]] > arrays["counts"][best[node] + 1]
    assert best[node] + 1 < first[node + 1]
    best[node] += 1


TAMPERINGS = {
    "no node at all": empty,
    **{f"{name} too short": cut(name) for name in ARRAYS},
    "children out of order": swap_children,
    "the same child twice": put("tokens", 1, 1),
    "a token below zero": put("tokens", 1, -1),
    "a token above the mark": put("tokens", 6, SEP + 1),
    "the mark inside a document": put("tokens", -1, VOCAB),
    "a child more frequent than its parent": put("counts", -1, 100),
    "a root less frequent than its children": put("counts", 0, 1),
    "a count below the threshold": put("counts", 5, 0),
    "a root that is its own child": put("first_child", 0, 0),
    "a child that is its own parent": put("first_child", 3, 3),
    "children that begin after they end": put("first_child", 1, 9),
    "children behind the last node": put("first_child", -1, 99),
    "a best child in another run": put("best_child", 0, 8),
    "a best child behind the last node": put("best_child", 0, 99),
    "no best child in spite of children": put("best_child", 0, -1),
    "a best child of a leaf": put("best_child", -1, 1),
    "the greater token of a tie": put("best_child", 0, 2),
    "the mark as the best token of all": put("best_child", 0, 6),
    "a less frequent best child": worse_child,
}


@settings(deadline=None, max_examples=80)
@given(documents, st.integers(1, 8), st.integers(1, 3))
def test_what_was_built_passes(documents: list[list[int]], n_max: int, p_min: int) -> None:
    make_index(documents, n_max, p_min).check_integrity()


def test_the_untampered_copy_passes() -> None:
    rebuilt(trie()).check_integrity()


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_a_tampered_index_is_refused(
    tampering: Callable[[dict[str, np.ndarray]], None],
) -> None:
    arrays = trie()
    tampering(arrays)
    with pytest.raises(DraftError, match="build the index again"):
        rebuilt(arrays).check_integrity()
