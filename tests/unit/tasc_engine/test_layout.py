"""Packing: every token lands where its row and position say, and sees exactly its past."""

import numpy as np
import torch
from draft_trees import forest, no_moves
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_draft import Drafts
from tasc_engine.layout import MAX_GROUPED_TOKENS, Feed, StepLayout, pack, plain_feed

CPU = torch.device("cpu")
LENGTH = 256
# Of each row: tokens in the cache, tokens it brings, parents of its draft (None: may not emit).
parents = st.integers(0, 9).flatmap(
    lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))
)
row_parts = st.dictionaries(
    st.integers(0, 7),
    st.tuples(st.integers(0, 40), st.integers(1, MAX_GROUPED_TOKENS + 20), st.none() | parents),
    min_size=1,
)


def feed_of(parts) -> Feed:
    rows = sorted(parts)
    starts, sizes = [parts[r][0] for r in rows], [parts[r][1] for r in rows]
    trees = [parts[r][2] for r in rows if parts[r][2] is not None]
    may = np.array([parts[r][2] is not None for r in rows])
    return Feed(
        np.array(rows, np.int32),
        np.array(starts, np.int32),
        np.concatenate([np.arange(parts[r][1], dtype=np.int32) for r in rows]),
        np.cumsum([0, *sizes]).astype(np.int32),
        np.where(may, np.cumsum(may) - 1, -1).astype(np.int32),
        forest(trees),
        no_moves(),
    )


def seen_by_each(layout: StepLayout) -> dict[int, set[int]]:
    """The cache places that each packed token attends to."""
    seen = {}
    for group in layout.groups:
        rows, places = group.gather.shape
        bias = group.bias(1, torch.float64, None).view(rows, places, group.kv_length)
        for packed, padded in zip(group.packed.tolist(), group.padded.tolist(), strict=True):
            line, place = divmod(padded, places)
            assert group.gather[line, place] == packed
            assert packed not in seen
            first = (group.begin + line) * LENGTH
            seen[packed] = {first + int(k) for k in torch.nonzero(bias[line, place] == 0)}
    return seen


@settings(deadline=None)  # the first example compiles
@given(row_parts)
def test_each_token_attends_once_to_its_own_past_and_its_own_branch(parts) -> None:
    layout = pack(feed_of(parts), LENGTH, CPU)
    seen, n = seen_by_each(layout), 0
    looked_at = []
    for row in sorted(parts):
        start, size, tree = parts[row]
        first = row * LENGTH
        past = {first + k for k in range(start)}
        for k in range(size):
            past.add(first + start + k)
            assert seen[n] == past
            assert layout.positions[n] == start + k
            assert layout.places[n] == first + start + k
            n += 1
        if tree is None:
            continue
        looked_at.append(n - 1)
        depths, branches = [], []
        for x, parent in enumerate(tree):
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            branches.append(
                (branches[parent] if parent >= 0 else past) | {first + start + size + x}
            )
            assert seen[n] == branches[x]
            assert layout.positions[n] == start + size - 1 + depths[x]
            assert layout.places[n] == first + start + size + x
            looked_at.append(n)
            n += 1
    assert len(seen) == n == len(layout.ids)
    assert layout.looked_at.tolist() == looked_at


def test_a_window_hides_what_lies_too_far_back_in_its_own_branch() -> None:
    """Nodes 0 and 1 are siblings, 2 is a child of 0: by position it is one behind them."""
    layout = pack(feed_of({0: (5, 1, (-1, -1, 0))}), LENGTH, CPU)
    (group,) = layout.groups
    bias = group.bias(1, torch.float64, 3).view(4, group.kv_length)
    assert [torch.nonzero(line == 0).view(-1).tolist() for line in bias] == [
        [3, 4, 5], [4, 5, 6], [4, 5, 7], [5, 6, 8],
    ]  # fmt: skip


def test_heads_that_share_keys_have_the_same_mask() -> None:
    (group,) = pack(feed_of({0: (5, 2, (-1,)), 2: (1, 1, ())}), LENGTH, CPU).groups
    one, three = (group.bias(shared, torch.float32, None) for shared in (1, 3))
    assert torch.equal(three, one.repeat(1, 1, 3, 1))


def test_long_prompts_attend_alone() -> None:
    parts = {0: (0, 1, ()), 1: (0, MAX_GROUPED_TOKENS + 1, ()), 2: (0, 4, ())}
    layout = pack(feed_of(parts), LENGTH, CPU)
    assert [g.gather.shape for g in layout.groups] == [(3, 4), (1, MAX_GROUPED_TOKENS + 1)]


def test_a_group_is_full_only_where_nothing_is_padded() -> None:
    assert pack(plain_feed([0, 1, 2], 7, np.ones(2, np.int32)), LENGTH, CPU).groups[0].full
    assert not pack(plain_feed([0, 2], 7, np.ones(2, np.int32)), LENGTH, CPU).groups[0].full
    assert Drafts.empty(3).offsets.tolist() == [0, 0, 0, 0]
