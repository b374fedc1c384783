"""Parameter lists: pairs daily, the full product with --all."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

_PRODUCT = pytest.mark.slow("the product of what is paired daily")


def paired(
    *crossed: Iterable[Any], by: Iterable[Any] = (), and_by: Iterable[Any] = ()
) -> list[Any]:
    """Returns all combinations in the order of parameters; daily ones cover every value.

    Daily ones cover all values of ``crossed``, each with the next value of the others in turn.
    """
    others = [values for values in (list(by), list(and_by)) if values]
    axes, found = [*map(list, crossed), *others], []
    turns = sum(len(axis) - 1 for axis in axes[: len(crossed)]) + 1
    assert all(len(values) <= turns for values in others), "a value would not be tested daily"
    for places in product(*(range(len(axis)) for axis in axes)):
        turn = sum(places[: len(crossed)])
        rest = zip(others, places[len(crossed) :], strict=True)
        daily = all(place == turn % len(values) for values, place in rest)
        values = (axis[place] for axis, place in zip(axes, places, strict=True))
        found.append(pytest.param(*values, marks=() if daily else _PRODUCT))
    return found
