"""Tests that a tree grown level by level in tensors equals one grown by path in plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neural_rows import tree

from tasc_engine.drafting.neural.tree import Beam
from tasc_engine.drafting.safe_proposer import is_forest

Path = tuple[int, ...]
F32 = np.float32
NOWHERE = F32(-np.inf)


@dataclass(frozen=True)
class Shape:
    """A tree to be grown; ``eos`` are the ids that end a path."""

    rows: int
    width: int
    depth: int
    vocab: int
    seed: int
    holes: float = 0.0
    eos: tuple[int, ...] = (0,)

    @property
    def expanded(self) -> int:
        """Number of expanded nodes of a level, and of considered children of each."""
        return min(self.width, self.vocab)


@dataclass(frozen=True)
class Node:
    """A candidate; ``number`` is its place among its row's."""

    logp: np.float32
    path: Path
    number: int


@dataclass
class Chances:
    """Log-probabilities of the tokens after each path, made at the first request."""

    shape: Shape
    known: dict[tuple[int, Path], list[tuple[int, np.float32]]] = field(default_factory=dict)

    def after(self, row: int, path: Path) -> list[tuple[int, np.float32]]:
        """Returns the most likely children, in decreasing order."""
        if (row, path) not in self.known:
            shape = self.shape
            rng = np.random.default_rng((shape.seed, row, len(path), *path))
            logits = rng.normal(0, 2, shape.vocab)
            logp = (logits - np.log(np.exp(logits).sum())).astype(F32)
            logp[rng.random(shape.vocab) < shape.holes] = NOWHERE
            best = np.argsort(-logp, kind="stable")[: shape.expanded]
            self.known[row, path] = [(int(token), logp[token]) for token in best]
        return self.known[row, path]


def by_hand(chances: Chances, row: int) -> list[Node]:
    """Returns all candidates of a row that have a probability, the most likely first."""
    shape = chances.shape
    found: list[Node] = []
    expanded, count = [Node(F32(0), (), -1)], 0
    for _ in range(shape.depth):
        level = []
        for above in expanded:
            for token, logp in chances.after(row, above.path):
                level.append(Node(F32(above.logp + logp), (*above.path, token), count))
                count += 1
        level = [node for node in level if np.isfinite(node.logp)]
        found += level
        best = sorted(level, key=lambda node: (-node.logp, node.number))[: shape.expanded]
        expanded = [node for node in best if node.path[-1] not in shape.eos]
    return sorted(found, key=lambda node: (-node.logp, len(node.path), node.number))


def cut(
    rows: Sequence[list[Node]], nodes: int, budget: Sequence[int], min_probs: Sequence[float] | None
) -> list[list[Path]]:
    """Returns the drafted paths in order."""
    kept = [row[: min(nodes, most)] for row, most in zip(rows, budget, strict=True)]
    if min_probs is not None:
        every = [(-node.logp, len(node.path), i) for i, row in enumerate(kept) for node in row]
        worth = 0
        for (logp, _, _), wanted in zip(sorted(every), min_probs, strict=False):
            if np.exp(-logp) < F32(wanted):
                break
            worth += 1
        taken = sorted(every)[:worth]
        kept = [row[: sum(i == own for *_, own in taken)] for i, row in enumerate(kept)]
    return [[node.path for node in row] for row in kept]


def grown(chances: Chances) -> Beam:
    """Returns a beam after all levels, and checks the frontier at each level."""
    shape = chances.shape
    is_eos = torch.zeros(shape.vocab, dtype=torch.bool)
    is_eos[list(shape.eos)] = True
    beam = Beam(shape.width)
    paths: list[list[Path]] = [[()] for _ in range(shape.rows)]
    seen: list[list[frozenset[int]]] = [[frozenset()] for _ in range(shape.rows)]
    for level in range(shape.depth):
        each = [[chances.after(row, path) for path in paths[row]] for row in range(shape.rows)]
        logp = torch.tensor(np.array([[[p for _, p in n] for n in row] for row in each]))
        tokens = torch.tensor([[[token for token, _ in n] for n in row] for row in each])
        frontier = beam.grow(logp, tokens, is_eos)
        width = frontier.tokens.shape[1]
        bits = [level * width + i for i in range(width)]
        above, chosen = frontier.above.tolist(), frontier.tokens.tolist()
        for row in range(shape.rows):
            parents = above[row]
            seen[row] = [seen[row][parents[i]] | {bits[i]} for i in range(width)]
            paths[row] = [(*paths[row][parents[i]], chosen[row][i]) for i in range(width)]
        assert [[{b for b in range(63) if word >> b & 1} for word in row]
                for row in frontier.tree.tolist()] == seen  # fmt: skip
    return beam


shapes = st.builds(
    Shape,
    rows=st.integers(1, 3),
    width=st.integers(1, 4),
    depth=st.integers(1, 4),
    vocab=st.integers(2, 7),
    seed=st.integers(0, 2**32 - 1),
    holes=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
    eos=st.sampled_from([(), (0,), (0, 1)]),
)
limits = st.tuples(
    st.integers(1, 40),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.none() | st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.2, 0.6]), max_size=40),
)


@settings(max_examples=500)
@given(shapes, limits)
def test_likeliest_expanded_paths_are_drafted(shape, limits) -> None:
    nodes, budgets, min_probs = limits
    chances = Chances(shape)
    budget = np.array(budgets[: shape.rows], np.int32)
    wanted = None if min_probs is None else np.array(min_probs, F32)
    drafts = grown(chances).drafts(nodes, budget, wanted)
    assert is_forest(drafts, budget, shape.vocab, shape.depth)
    rows = [by_hand(chances, row) for row in range(shape.rows)]
    expected = cut(rows, nodes, budget.tolist(), min_probs)
    for row, paths in enumerate(expected):
        by_path = {node.path: float(node.logp) for node in rows[row]}
        assert [*tree(drafts, row).items()] == [(path, by_path[path]) for path in paths]


def levels(*each: list[list[float]]) -> Beam:
    """Returns a beam of one row and tokens 1, 2, ... with these log-probabilities of children."""
    beam = Beam(len(each[0][0]))
    for level in each:
        logp = torch.tensor([level], dtype=torch.float32)
        tokens = torch.arange(1, logp.shape[-1] + 1).expand(logp.shape)
        beam.grow(logp, tokens, torch.zeros(9, dtype=torch.bool))
    return beam


def test_certain_child_follows_its_parent() -> None:
    beam = levels([[0.0, -2.0]], [[0.0, -2.0]] * 2, [[0.0, -2.0]] * 2)
    drafts = beam.drafts(3, np.array([9], np.int32), None)
    assert [*tree(drafts)] == [(1,), (1, 1), (1, 1, 1)]


@pytest.mark.parametrize("most", range(1, 7))
def test_cut_of_nearly_equal_probabilities_leaves_a_tree(most: int) -> None:
    """Paths of log-probabilities -200 and below all have a float32 probability of 0."""
    beam = levels([[-200.0, -203.0]], [[-1.0, -4.0], [-0.5, -9.0]], [[-0.1, -3.0], [-0.1, -5.0]])
    budget, min_probs = np.array([9], np.int32), np.zeros(most, F32)
    drafts = beam.drafts(9, budget, min_probs)
    whole = [*tree(beam.drafts(9, budget, None))]
    assert is_forest(drafts, budget, 9, 3)
    assert [*tree(drafts)] == whole[:most]
