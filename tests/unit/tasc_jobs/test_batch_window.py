"""Rows come out of the window in order, each as often as it takes, and few are in it."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tasc_jobs.batch.window import Saved, Window
from tasc_jobs.batch.work import Row


def source(count: int, refused: frozenset[int] = frozenset()) -> Iterator[Row]:
    for i in range(count):
        yield Row(i, f"r{i}", "x", i + 1, None, "bad" if i in refused else None)


def test_only_so_many_rows_are_read_until_the_first_are_dropped() -> None:
    window = Window(source(10), 0, (), 4)
    assert window.read(100) == 4
    assert [row.ordinal for row in window.take(3)] == [0, 1, 2]
    assert window.save([Saved(1), Saved(2)]) == 2
    assert window.ready == 0
    window.save([Saved(0)])
    assert window.ready == 3
    assert window.read(100) == 0
    window.drop(3)
    assert (window.first, window.ready, window.read(100)) == (3, 0, 3)


def test_long_rows_fill_it_sooner() -> None:
    window = Window((Row(i, "", "x" * (30 << 20), 1) for i in range(9)), 0, (), 100)
    assert window.read(100) == 3


def test_rows_of_before_are_read_over_and_those_that_are_saved_are_not_handed_out() -> None:
    window = Window(source(6, frozenset({4})), 2, [Saved(3, tokens=7)], 10)
    window.read(100)
    assert [row.ordinal for row in window.take(10)] == [2, 5]
    assert sorted((s.ordinal, s.failed, s.tokens) for s in window.saved) == [
        (3, False, 7),
        (4, True, 0),
    ]


def test_what_was_lost_is_handed_out_first_but_not_what_was_saved_since() -> None:
    window = Window(source(6), 0, (), 10)
    window.read(100)
    window.take(4)
    window.save([Saved(0), Saved(1), Saved(2)])
    assert window.ready == 3
    window.again([1, 3])
    assert window.ready == 1
    window.save([Saved(3)])
    assert [row.ordinal for row in window.take(2)] == [1, 4]


@given(
    st.integers(0, 30),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 31)), max_size=80),
)
def test_whatever_is_lost_on_the_way_each_row_is_dropped_once_and_in_order(
    count: int, most: int, moves: list[tuple[int, int]]
) -> None:
    window = Window(source(count), 0, (), most)
    out: list[int] = []
    held: list[int] = []

    def flush() -> None:
        ready = window.ready
        out.extend(row.ordinal for row in window.head(ready))
        window.drop(ready)

    for kind, number in moves:
        window.read(3)
        if kind == 0:
            held += [row.ordinal for row in window.take(number)]
        elif kind == 1 and held:
            window.save([Saved(held.pop(number % len(held)))])
        elif kind == 2 and held:
            window.again([held.pop(number % len(held))])
        elif kind == 3:
            saved = sorted(s.ordinal for s in window.saved)
            window.again(saved[number:])
        else:
            flush()
        assert window.size <= most
    while not window.empty:
        window.read(100)
        held += [row.ordinal for row in window.take(100)]
        window.save([Saved(ordinal) for ordinal in held])
        held = []
        flush()
    assert out == list(range(count))
