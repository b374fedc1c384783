"""Packing: every token lands where its row and position say, and sees exactly its past."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasc_engine.layout import MAX_GROUPED_TOKENS, pack

CPU = torch.device("cpu")
row_sizes = st.dictionaries(
    st.integers(0, 7),
    st.tuples(st.integers(0, 40), st.integers(1, MAX_GROUPED_TOKENS + 20)),
    min_size=1,
)


@given(row_sizes, st.randoms(use_true_random=False))
def test_each_token_attends_once_and_to_its_own_past(parts, rng) -> None:
    rows = sorted(parts)
    starts = [parts[r][0] for r in rows]
    sizes = [parts[r][1] for r in rows]
    looked_at = [rng.randint(0, n) for n in sizes]
    tokens = [np.arange(n, dtype=np.int32) + 100 * r for r, n in zip(rows, sizes, strict=True)]
    layout = pack(rows, starts, tokens, looked_at, CPU)
    expected = [(r, s + i) for r, s, n in zip(rows, starts, sizes, strict=True) for i in range(n)]
    assert list(zip(layout.rows.tolist(), layout.positions[0].tolist(), strict=True)) == expected
    seen = {}
    for group in layout.groups:
        lengths = group.mask.sum(-1)[:, 0]
        places = group.gather.shape[1]
        for packed, padded in zip(group.packed.tolist(), group.padded.tolist(), strict=True):
            line, place = divmod(padded, places)
            assert group.gather[line, place] == packed
            seen[packed] = (group.begin + line, int(lengths[line, place]) - 1)
    assert [seen[i] for i in range(len(expected))] == expected


def test_the_lm_head_looks_at_each_rows_last_tokens() -> None:
    tokens = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
    layout = pack([0, 4], [0, 7], tokens, [2, 3], CPU)
    assert layout.looked_at.tolist() == [3, 4, 5, 6, 7]
    assert pack([0, 4], [0, 7], tokens, [0, 1], CPU).looked_at.tolist() == [7]


def test_long_prompts_attend_alone() -> None:
    tokens = [np.zeros(n, np.int32) for n in (1, MAX_GROUPED_TOKENS + 1, 4)]
    layout = pack([0, 1, 2], [0, 0, 0], tokens, [1, 1, 1], CPU)
    assert [g.gather.shape for g in layout.groups] == [(3, 4), (1, MAX_GROUPED_TOKENS + 1)]
