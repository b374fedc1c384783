"""A step's rows are laid out by position; acceptance follows the target through a tree."""

import numpy as np
from guide_walks import ids
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tree_layouts import Row, forest, kv_starts_of, layout_of, parents_of, visible

from tasc_draft.drafts import FORCED
from tasc_engine.config import MAX_NODES
from tasc_engine.kernels import torch_attention
from tasc_engine.layout import ForwardBatch, lay_out, plain_batch
from tasc_engine.sampling.accept import EmitLimits, accept, count, moves

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
    """Returns emitted tokens and accepted nodes by a simple reference."""
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
def test_accepted_path_follows_the_target_through_the_tree(rows) -> None:
    drafts = forest([r[0] for r in rows], [r[1] for r in rows])
    chosen = np.array([t for r in rows for t in r[2]], np.int64)
    room = np.array([r[3] for r in rows], np.int32)
    ends = np.array([r[4] for r in rows])
    found = accept(chosen, drafts, EmitLimits(room, ends, IS_EOS))
    for i, row in enumerate(rows):
        out, path = followed(*row)
        assert found.tokens[i, : found.emitted[i]].tolist() == out
        assert found.path[i, : found.followed[i]].tolist() == path


@settings(deadline=None)  # the first example compiles
@given(st.lists(trees, min_size=1, max_size=4), st.data())
def test_accepted_nodes_move_to_the_slots_of_their_depths(rows, data) -> None:
    drafts = forest([r[0] for r in rows], [r[1] for r in rows])
    chosen = np.array([t for r in rows for t in r[2]], np.int64)
    room, ends = np.full(len(rows), 9, np.int32), np.ones(len(rows), bool)
    found = accept(chosen, drafts, EmitLimits(room, ends, IS_EOS))
    alive = np.array([data.draw(st.sampled_from([-1, 2 * i])) for i in range(len(rows))], np.int64)
    next_slots = np.arange(len(rows), dtype=np.int32) + 5
    cache = np.arange(2 * len(rows) * LENGTH)
    source, target = moves(found, np.where(alive < 0, -1, alive * LENGTH), next_slots)
    cache[target] = cache[source]
    for i, row in enumerate(alive):
        first = row * LENGTH + next_slots[i]
        if row >= 0:
            path = found.path[i, : found.followed[i]]
            assert cache[first : first + len(path)].tolist() == (first + path).tolist()
    assert not set(target // LENGTH) - set(alive[alive >= 0])


def test_draft_tokens_are_counted_by_source_and_depth() -> None:
    drafts = forest([(-1, -1, 0, 2), ()], [(1, 2, 3, 4), ()])
    drafts.source[:] = [0, 1, 1, 0]
    chosen, room, ends = np.array([1, 3, 9, 5, 9, 9]), np.array([9, 9], np.int32), np.ones(2, bool)
    found = accept(chosen, drafts, EmitLimits(room, ends, IS_EOS_WIDE))
    assert found.emitted.tolist() == [3, 1]
    drafted, reached, kept, *by_row, forced = count(drafts, found, ids([3, 1]), 2, 4)
    assert forced == 0
    assert [each.tolist() for each in by_row] == [[4, 0], [2, 0]]
    assert drafted.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
    assert reached.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    assert kept.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    cut = count(drafts, found, np.array([1, 1], np.int32), 2, 4)[2]
    assert cut.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_forced_tokens_are_counted_separately_and_take_no_draft_position() -> None:
    drafts = forest([(-1, 0, 1, -1)], [(1, 2, 3, 4)])
    drafts.source[:] = [0, FORCED, 1, 0]
    limits = EmitLimits(ids([9]), np.ones(1, bool), IS_EOS_WIDE)
    found = accept(np.array([1, 2, 3, 5, 9]), drafts, limits)
    drafted, reached, kept, *by_row, forced = count(drafts, found, ids([4]), 2, 3)
    assert (forced, found.followed.tolist()) == (1, [3])
    assert drafted.tolist() == [[2, 0, 0], [0, 1, 0]]
    assert reached.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert kept.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert [each.tolist() for each in by_row] == [[3], [2]]
    assert count(drafts, found, ids([1]), 2, 3).forced == 0


IS_EOS_WIDE = np.zeros(10, bool)
drafted = st.none() | parents_of(MAX_NODES)
row = st.tuples(st.integers(0, 40), st.integers(1, 70), drafted)
parts_of_rows = st.lists(st.tuples(st.integers(0, 9), row), min_size=1, max_size=6)
CHAIN = tuple(range(-1, MAX_NODES - 1))
HIGHEST_BIT: list[tuple[int, Row]] = [(3, (5, 1, CHAIN)), (0, (0, 2, (*CHAIN[:-1], 0)))]


@settings(deadline=None)  # the first example compiles
@given(parts_of_rows, st.booleans(), st.booleans(), st.none() | st.integers(1, 80))
@example(HIGHEST_BIT, True, False, None)
@example(HIGHEST_BIT, False, True, 7)
def test_step_layout_matches_its_definition(parts, backwards, adapted, window) -> None:
    rows = [row for _, row in parts]  # after as many free slots
    kv_starts = kv_starts_of(rows, [gap for gap, _ in parts], backwards)
    own = np.arange(len(rows), dtype=np.int32) * 7 % 5 if adapted else None
    sizes, may = [size for _, size, _ in rows], np.array([tree is not None for *_, tree in rows])
    offsets = np.cumsum([0, *sizes]).astype(np.int32)
    tokens = np.arange(100, 100 + sum(sizes), dtype=np.int32)
    drafts = forest([tree for *_, tree in rows if tree is not None])
    draft_of = np.where(may, np.cumsum(may) - 1, -1).astype(np.int32)
    context_lens = np.array([start for start, *_ in rows], np.int32)
    places = np.array(kv_starts, np.int64)
    step = lay_out(ForwardBatch(places, context_lens, tokens, offsets, draft_of, drafts, own))
    ids: list[int] = []
    for fed, (_, size, tree) in zip(offsets[:-1].tolist(), rows, strict=True):
        ids += [*range(100 + fed, 100 + fed + size), *range(1, len(tree or ()) + 1)]
    for name, expected in vars(layout_of(rows, kv_starts, ids, own)).items():
        found = getattr(step, name)
        assert (found.dtype, found.tolist()) == (np.int64, expected.tolist()), name
    sees = [
        {first + int(place) for place in np.flatnonzero(line)}
        for row, first in enumerate(kv_starts)
        for line in torch_attention.visible(step, row, window)
    ]
    assert sees == [set(line) for line in visible(rows, kv_starts, window)]


def test_plain_batch_has_the_same_tokens_in_each_row() -> None:
    step = lay_out(plain_batch([40, 3, 21], 7, np.array([5, 6], np.int32)))
    assert (step.ids.tolist(), step.slots.tolist()) == ([5, 6] * 3, [47, 48, 10, 11, 28, 29])
    assert (step.positions.tolist(), step.logits_indices.tolist()) == ([7, 8] * 3, [1, 3, 5])
    assert step.moves.shape == (2, 0)
