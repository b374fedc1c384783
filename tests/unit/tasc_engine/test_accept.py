"""Acceptance follows the target through a tree, as far as draft, end and room allow."""

import numpy as np
from draft_trees import forest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_engine.accept import accept, count, moves

EOS = 0
IS_EOS = np.array([i == EOS for i in range(6)])
LENGTH = 100
trees = st.integers(0, 8).flatmap(
    lambda n: st.tuples(
        st.tuples(*(st.integers(-1, i - 1) for i in range(n))),
        st.tuples(*(st.integers(0, 3) for _ in range(n))),
        st.tuples(*(st.integers(0, 3) for _ in range(n + 1))),
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
    found = accept(
        chosen, drafts, np.full(len(rows), 9, np.int32), np.ones(len(rows), bool), IS_EOS
    )
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
