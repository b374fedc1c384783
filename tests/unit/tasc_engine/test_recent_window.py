"""The sliding window of recent tokens is what a naive one in Python is, whatever comes."""

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import refused
from tasc_engine.drafting.neural.recent import RecentWindow

ROWS, VOCABULARY = 3, 12
CPU = torch.device("cpu")

candidates = st.lists(st.integers(-1, VOCABULARY), max_size=20)
appends = st.tuples(
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True),
    st.lists(candidates, min_size=ROWS, max_size=ROWS),
    st.none() | st.integers(0, ROWS - 1),
)


def table(parts: list[list[int]]) -> Tensor:
    wide = max(1, *map(len, parts))
    return torch.tensor([[*ids, *[-1] * (wide - len(ids))] for ids in parts])


def active(window: RecentWindow, row: int) -> list[int]:
    return sorted(int(id_) for id_ in window.ids[row] if id_ >= 0)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 15), steps=st.lists(appends, min_size=1, max_size=15))
def test_it_holds_what_a_naive_one_holds_after_every_append(size, steps):
    window = RecentWindow(ROWS, size, VOCABULARY, CPU)
    naive = [deque[int](maxlen=size) for _ in range(ROWS)]
    buffer = torch.full((ROWS, window.capacity + 1), -1)
    everyone = torch.arange(ROWS)
    for rows, streams, cleared in steps:
        if cleared is not None:
            window.clear(cleared)
            naive[cleared].clear()
        entered = window.append(torch.tensor(rows), table([streams[row] for row in rows]))
        buffer.view(-1)[entered.places.flatten()] = entered.ids.flatten()
        for row in rows:
            naive[row].extend(id_ for id_ in streams[row] if 0 <= id_ < VOCABULARY)
        expected = [sorted(set(stream)) for stream in naive]
        assert [active(window, row) for row in range(ROWS)] == expected
        assert window.sizes(everyone).tolist() == list(map(len, expected))
        # What a slot was given when its token entered is still there.
        assert torch.equal(buffer[:, :-1][window.ids >= 0], window.ids[window.ids >= 0])
        used = [
            int((ids >= 0).nonzero().max()) + 1 if (ids >= 0).any() else 0 for ids in window.ids
        ]
        assert all(u <= p for u, p in zip(used, window.peaks(everyone).tolist(), strict=True))


def test_a_token_that_stays_keeps_its_slot():
    window = RecentWindow(1, 4, VOCABULARY, CPU)
    row = torch.tensor([0])
    window.append(row, torch.tensor([[5, 6, 7, 5]]))
    slot = window.ids[0].tolist().index(5)
    window.append(row, torch.tensor([[8, 9]]))
    assert active(window, 0) == [5, 7, 8, 9]
    assert window.ids[0, slot] == 5


def test_tokens_left_out_pass_through_the_window_without_a_slot():
    left_out = torch.zeros(VOCABULARY, dtype=torch.bool)
    left_out[[1, 3]] = True
    window = RecentWindow(2, 3, VOCABULARY, CPU, left_out)
    rows = torch.tensor([1])
    window.append(rows, torch.tensor([[1, 2, 3]]))
    assert active(window, 1) == [2]
    window.append(rows, torch.tensor([[4, 1]]))
    assert active(window, 1) == [4]


def test_of_doubles_the_last_one_stays():
    window = RecentWindow(2, 3, VOCABULARY, CPU)
    ids = torch.tensor([[4, 4, -1, 2, 4], [0, 1, 0, 1, 1]])
    expected = [[-1, -1, -1, 2, 4], [-1, -1, 0, -1, 1]]
    assert window.distinct(torch.arange(2), ids).tolist() == expected


@pytest.mark.parametrize(("rows", "size"), [(0, 3), (3, 0)])
def test_no_rows_or_no_window_are_refused(rows, size):
    with refused(ValueError, ""):
        RecentWindow(rows, size, VOCABULARY, CPU)
