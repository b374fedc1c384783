"""A step's rows are laid out by position; acceptance follows the target through a tree."""

from typing import Any

import numpy as np
from draft_trees import forest, no_moves
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tree_layouts import parents_of

from tasc_engine.kernels.torch_attention import visible
from tasc_engine.layout import MOST_NODES, Feed, Int64, StepLayout, lay_out, plain_feed
from tasc_engine.step.verify import accept, count, moves

EOS = 0
IS_EOS = np.array([i == EOS for i in range(6)])
LENGTH = 100
trees = parents_of(8).flatmap(
    lambda parents: st.tuples(
        st.just(parents),
        st.tuples(*(st.integers(0, 3) for _ in parents)),
        st.tuples(*(st.integers(0, 3) for _ in (*parents, 0))),
        st.integers(1, 6),
        st.booleans(),
    )
)


def followed(parents, tokens, chosen, room, ends) -> tuple[list[int], list[int]]:
    """Plain: emitted tokens and accepted nodes."""
    node, out, path = -1, [], []
    while True:
        out.append(chosen[node + 1])
        children = [x for x, p in enumerate(parents) if p == node and tokens[x] == out[-1]]
        if children:
            node = children[0]
            path.append(node)
        if not children or (ends and out[-1] == EOS) or len(out) == room:
            return out, path


@settings(deadline=None)  # the first example compiles
@given(st.lists(trees, min_size=1, max_size=4))
def test_each_row_emits_what_the_target_says_along_its_tree(rows) -> None:
    drafts = forest([r[0] for r in rows], [r[1] for r in rows])
    chosen = np.array([t for r in rows for t in r[2]], np.int64)
    room = np.array([r[3] for r in rows], np.int32)
    ends = np.array([r[4] for r in rows])
    found = accept(chosen, drafts, room, ends, IS_EOS)
    for i, row in enumerate(rows):
        out, path = followed(*row)
        assert found.tokens[i, : found.emitted[i]].tolist() == out
        assert found.path[i, : found.followed[i]].tolist() == path


@settings(deadline=None)  # the first example compiles
@given(st.lists(trees, min_size=1, max_size=4), st.data())
def test_accepted_nodes_move_to_where_their_depth_says(rows, data) -> None:
    drafts = forest([r[0] for r in rows], [r[1] for r in rows])
    chosen = np.array([t for r in rows for t in r[2]], np.int64)
    room, ends = np.full(len(rows), 9, np.int32), np.ones(len(rows), bool)
    found = accept(chosen, drafts, room, ends, IS_EOS)
    alive = np.array([data.draw(st.sampled_from([-1, 2 * i])) for i in range(len(rows))], np.int64)
    behind = np.arange(len(rows), dtype=np.int32) + 5
    cache = np.arange(2 * len(rows) * LENGTH)
    source, target = moves(found, np.where(alive < 0, -1, alive * LENGTH), behind)
    cache[target] = cache[source]
    for i, row in enumerate(alive):
        first = row * LENGTH + behind[i]
        if row >= 0:
            path = found.path[i, : found.followed[i]]
            assert cache[first : first + len(path)].tolist() == (first + path).tolist()
    assert not set(target // LENGTH) - set(alive[alive >= 0])


def test_a_step_is_counted_by_source_and_depth() -> None:
    drafts = forest([(-1, -1, 0, 2), ()], [(1, 2, 3, 4), ()])
    drafts.source[:] = [0, 1, 1, 0]
    chosen, room, ends = np.array([1, 3, 9, 5, 9, 9]), np.array([9, 9], np.int32), np.ones(2, bool)
    found = accept(chosen, drafts, room, ends, IS_EOS_WIDE)
    assert found.emitted.tolist() == [3, 1]
    drafted, reached, kept = count(drafts, found, np.array([3, 1], np.int32), 2, 4)
    assert drafted.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
    assert reached.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert kept.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    cut = count(drafts, found, np.array([1, 1], np.int32), 2, 4)[2]
    assert cut.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


IS_EOS_WIDE = np.zeros(10, bool)
# Of each row: free places before it, tokens in the cache, tokens it brings, parents of its draft
# (None: may not emit).
Part = tuple[int, int, int, tuple[int, ...] | None]
drafted = st.none() | parents_of(MOST_NODES)
part = st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(1, 70), drafted)
parts_of_rows = st.lists(part, min_size=1, max_size=6)
CHAIN = tuple(range(-1, MOST_NODES - 1))
HIGHEST_BIT: list[Part] = [(3, 5, 1, CHAIN), (0, 0, 2, (*CHAIN[:-1], 0))]


def firsts_of(parts: list[Part], backwards: bool) -> list[int]:
    """Rows lie behind each other, in their order or in the opposite one."""
    firsts, end = [0] * len(parts), 0
    order = range(len(parts))
    for i in reversed(order) if backwards else order:
        gap, start, size, tree = parts[i]
        firsts[i] = end + gap
        end = firsts[i] + start + size + len(tree or ())
    return firsts


def laid_out(parts: list[Part], backwards: bool = False, adapters: Any = None) -> StepLayout[Int64]:
    sizes, may = [p[2] for p in parts], np.array([p[3] is not None for p in parts])
    feed = Feed(
        np.array(firsts_of(parts, backwards), np.int64),
        np.array([p[1] for p in parts], np.int32),
        np.arange(100, 100 + sum(sizes), dtype=np.int32),
        np.cumsum([0, *sizes]).astype(np.int32),
        np.where(may, np.cumsum(may) - 1, -1).astype(np.int32),
        forest([p[3] for p in parts if p[3] is not None]),
        no_moves(),
        adapters,
    )
    return lay_out(feed)


def seen_by_each(step: StepLayout[Int64], window: int | None) -> list[set[int]]:
    """The cache places that each packed token attends to."""
    return [
        {int(first + place) for place in np.flatnonzero(line)}
        for row, first in enumerate(step.firsts)
        for line in visible(step, row, window)
    ]


@settings(deadline=None)  # the first example compiles
@given(parts_of_rows, st.booleans())
@example(HIGHEST_BIT, True)
def test_each_token_attends_once_to_its_own_past_and_its_own_branch(parts, backwards) -> None:
    step = laid_out(parts, backwards)
    seen, n, looked_at = seen_by_each(step, None), 0, []
    for (_, start, size, tree), first in zip(parts, firsts_of(parts, backwards), strict=True):
        past = {first + k for k in range(start)}
        for k in range(size):
            past.add(first + start + k)
            assert seen[n] == past
            assert step.positions[n] == start + k
            assert step.slots[n] == first + start + k
            n += 1
        if tree is None:
            continue
        looked_at.append(n - 1)
        depths, branches = [], []
        for x, parent in enumerate(tree):
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            above = branches[parent] if parent >= 0 else past
            branches.append(above | {first + start + size + x})
            assert seen[n] == branches[x]
            assert step.positions[n] == start + size - 1 + depths[x]
            assert step.slots[n] == first + start + size + x
            looked_at.append(n)
            n += 1
    assert len(seen) == n == len(step.ids) == len(step.positions) == len(step.slots)
    assert step.looked_at.tolist() == looked_at


@settings(deadline=None)
@given(parts_of_rows, st.booleans(), st.integers(1, 80))
@example(HIGHEST_BIT, False, 7)
def test_a_window_hides_by_position_whatever_the_branch(parts, backwards, window) -> None:
    step, position_at = laid_out(parts, backwards), {}
    for (_, start, *_), first in zip(parts, firsts_of(parts, backwards), strict=True):
        position_at.update({first + k: k for k in range(start)})
    position_at.update(zip(step.slots.tolist(), step.positions.tolist(), strict=True))
    everything, near = seen_by_each(step, None), seen_by_each(step, window)
    for own, past, found in zip(step.positions.tolist(), everything, near, strict=True):
        assert found == {place for place in past if own - position_at[place] < window}


@settings(deadline=None)
@given(parts_of_rows)
def test_ids_adapters_and_the_bounds_of_rows_are_what_was_fed(parts) -> None:
    own = np.arange(len(parts), dtype=np.int32) * 7 % 5
    step, fed, ids, begins = laid_out(parts, adapters=own), 100, [], [0]
    for _, _, size, tree in parts:
        ids += [*range(fed, fed + size), *range(1, len(tree or ()) + 1)]
        begins.append(len(ids))
        fed += size
    assert step.adapters.tolist() == np.repeat(own, np.diff(begins)).tolist()
    assert not laid_out(parts).adapters.any()
    assert step.ids.tolist() == ids
    assert step.begins.tolist() == begins
    assert step.firsts.tolist() == firsts_of(parts, False)
    assert step.trunks.tolist() == [start + size for _, start, size, _ in parts]
    assert step.nodes.tolist() == [len(tree or ()) for *_, tree in parts]
    assert {array.dtype for array in vars(step).values()} == {np.dtype(np.int64)}


def test_a_plain_feed_brings_the_same_to_each_row_and_each_emits() -> None:
    step = lay_out(plain_feed([40, 3, 21], 7, np.array([5, 6], np.int32)))
    assert step.ids.tolist() == [5, 6] * 3
    assert step.slots.tolist() == [47, 48, 10, 11, 28, 29]
    assert step.positions.tolist() == [7, 8] * 3
    assert step.looked_at.tolist() == [1, 3, 5]
    assert step.moves.shape == (2, 0)
