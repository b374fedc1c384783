"""check_integrity passes on what was built and notices each way of not being a table."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from aligned_reference import built

from tasc_draft import DraftError
from tasc_draft.index.aligned import AlignedTable


def sample() -> AlignedTable:
    """Contexts with a tie, with a most frequent token, and with one continuation."""
    return built([([2 * (n % 3)], [12, 12, 12, 14, 14, 13, 15][n % 7 :][:1]) for n in range(63)])


def change(name: str, at: int, by: int) -> Callable[[AlignedTable], AlignedTable]:
    def apply(table: AlignedTable) -> AlignedTable:
        array = getattr(table, name).copy()
        array[at] += by
        return replace(table, **{name: array})

    return apply


def shorten(name: str) -> Callable[[AlignedTable], AlignedTable]:
    return lambda table: replace(table, **{name: getattr(table, name)[:-1].copy()})


TAMPERINGS = {
    "a head below zero": lambda table: replace(table, head=-1),
    "a token outside the vocabulary": lambda table: replace(table, vocab_size=13),
    "no buckets": lambda table: replace(table, slots=table.slots[:1].copy()),
    "buckets missed": lambda table: replace(table, slots=table.slots[:-2].copy()),
    "a bucket that begins elsewhere": change("slots", 1, 1),
    "keys out of order": lambda table: replace(table, keys=table.keys[::-1].copy()),
    "a count of nothing": lambda table: replace(table, counts=0 * table.counts),
    "a token below zero": lambda table: replace(table, tokens=-1 - table.tokens),
    "a total below its counts": change("totals", 0, -1),
    "a total above its counts": change("totals", 0, 1),
    "counts that begin late": change("first", 0, 1),
    "counts that end late": change("first", -1, 1),
    "a run that ends before it begins": change("first", 1, 1000),
    **{f"{name} too short": shorten(name) for name in AlignedTable.__annotations__ if name in
       ("keys", "first", "tokens", "counts", "totals")},
}  # fmt: skip


def test_continuations_out_of_order_are_refused() -> None:
    table = sample()
    at = int(np.flatnonzero(np.diff(table.first) > 1)[0])
    order = np.arange(len(table.tokens))
    order[table.first[at] : table.first[at + 1]] = order[table.first[at] : table.first[at + 1]][
        ::-1
    ]
    wrong = replace(table, tokens=table.tokens[order], counts=table.counts[order])
    with pytest.raises(DraftError, match="build the index again"):
        wrong.check_integrity()


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_a_tampered_table_is_refused(
    tampering: Callable[[AlignedTable], AlignedTable],
) -> None:
    table = sample()
    table.check_integrity()
    with pytest.raises(DraftError, match="build the index again"):
        tampering(table).check_integrity()


def test_arrays_are_read_only_and_their_bytes_are_counted() -> None:
    table = sample()
    assert not any(array.flags.writeable for array in table.view)
    assert table.nbytes == 4 * sum(len(array) for array in table.view) > 100
