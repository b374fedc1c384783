"""Packed trees from a description: their drafts, layouts, and reference attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tasc_draft import Drafts
from tasc_engine.layout import Int64, StepLayout

# For each row: tokens in the cache, new tokens, and parents of the draft nodes after them (None:
# the row may not emit).
Row = tuple[int, int, Sequence[int] | None]
Layout = StepLayout[Tensor]


def forest(trees: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]] | None = None) -> Drafts:
    """Returns trees from their parents; by default, tokens count from 1."""
    tokens = tokens or [range(1, len(tree) + 1) for tree in trees]
    depths = [depth for tree in trees for depth in depths_of(tree)]
    return Drafts(
        np.array([t for row in tokens for t in row], np.int32),
        np.array([p for tree in trees for p in tree], np.int32),
        np.array(depths, np.int16),
        np.cumsum([0, *(len(tree) for tree in trees)]).astype(np.int32),
        np.zeros(len(depths), np.float32),
        np.zeros(len(depths), np.int8),
    )


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def no_moves() -> Int64:
    return np.zeros((2, 0), np.int64)


def on(layout: Layout, device: Any) -> Layout:
    return StepLayout(**{name: part.to(device) for name, part in vars(layout).items()})


def kv_starts_of(rows: Sequence[Row], gaps: Sequence[int], backwards: bool) -> list[int]:
    """Returns the first places of rows in order or in reverse order, each after a gap."""
    kv_starts, end = [0] * len(rows), 0
    for row in reversed(range(len(rows))) if backwards else range(len(rows)):
        cached, brought, parents = rows[row]
        kv_starts[row] = end + gaps[row]
        end = kv_starts[row] + cached + brought + len(parents or ())
    return kv_starts


def layout_of(
    rows: Sequence[Row],
    kv_starts: Sequence[int],
    ids: Sequence[int] | None = None,
    adapters: Sequence[int] | None = None,
) -> Layout:
    """Returns a layout in which each row starts at its first place and has an adapter number."""
    positions, places, visible_lens, tree, query_offsets, logits_indices = [], [], [], [], [0], []
    for first, (cached, brought, parents) in zip(kv_starts, rows, strict=True):
        trunk, nodes, bits = cached + brought, len(parents or ()), list[int]()
        for node, parent in enumerate(parents or ()):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        positions += [*range(cached, trunk), *(trunk - 1 + d for d in depths_of(parents or ()))]
        places += range(first + cached, first + trunk + nodes)
        visible_lens += [*range(cached + 1, trunk + 1), *[trunk] * nodes]
        tree += [0] * brought + bits
        if parents is not None:
            logits_indices += range(query_offsets[-1] + brought - 1, len(positions))
        query_offsets.append(len(positions))
    assert len(set(places)) == len(places)
    numbers = {
        "ids": ids or [(7 * p + 3 * i) % 50 for i, p in enumerate(positions)],
        "positions": positions, "slots": places, "visible_lens": visible_lens, "tree": tree,
        "adapters": np.repeat(
            [0] * len(rows) if adapters is None else adapters, np.diff(query_offsets)
        ),
        "logits_indices": logits_indices, "query_offsets": query_offsets, "kv_starts": kv_starts,
        "trunks": [cached + brought for cached, brought, _ in rows],
        "nodes": [len(parents or ()) for _, _, parents in rows], "moves": no_moves(),
    }  # fmt: skip
    tensors = {name: torch.from_numpy(np.array(n, np.int64)) for name, n in numbers.items()}
    return StepLayout(**tensors)


def visible(rows: Sequence[Row], kv_starts: Sequence[int], window: int | None) -> list[list[int]]:
    """Returns the cache places that each packed token sees, from parents and positions alone."""
    found = []
    for first, (cached, brought, parents) in zip(kv_starts, rows, strict=True):
        trunk, above = cached + brought, parents or ()
        depth = depths_of(above)
        sees = [[(p, p, own) for p in range(own + 1)] for own in range(cached, trunk)]
        for node in range(len(above)):
            own, path, at = trunk - 1 + depth[node], [], node
            while at >= 0:
                path.append((trunk + at, trunk - 1 + depth[at], own))
                at = above[at]
            sees.append([*((p, p, own) for p in range(trunk)), *path])
        for each in sees:
            near = (place for place, at, own in each if window is None or own - at < window)
            found.append([first + place for place in near])
    return found


def by_definition(
    query: Tensor, pool: Tensor, sees: list[list[int]], scale: float, softcap: float | None
) -> Tensor:
    """Returns attention by its definition, ``float64[N, heads, D]``, token by token."""
    wide, found = pool.double().numpy(), []
    of = np.arange(query.shape[1]) // (query.shape[1] // pool.shape[2])
    for asked, places in zip(query.double().numpy(), sees, strict=True):
        keys, values = wide[places, 0][:, of], wide[places, 1][:, of]
        scores = (keys * asked).sum(-1) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(0))
        found.append((weights[..., None] * values).sum(0) / weights.sum(0)[:, None])
    return torch.from_numpy(np.stack(found))


def off(found: Tensor, expected: Tensor) -> float:
    """Returns the maximum difference; it is infinite if there is a NaN."""
    assert found.shape == expected.shape
    return float((found.double() - expected).abs().max().nan_to_num(torch.inf))


@dataclass(frozen=True)
class Shape:
    """One kind of attention; compiled code and kernels are made for each dim and dtype."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.float64
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        parts = [self.heads, self.kv_heads, self.dim, str(self.dtype)[6:]]
        return "-".join(map(str, parts + [n for n in (self.window, self.softcap) if n]))


@dataclass(frozen=True)
class Case:
    """Rows at separate places, the places that each token sees, and their values.

    Attributes:
        sees: The cache places that each packed token sees.
        pool: ``[places + 1, 2, kv_heads, dim]``.
        query: ``[N, heads, dim]``.
    """

    shape: Shape
    step: StepLayout[Tensor]
    sees: list[list[int]]
    pool: Tensor
    query: Tensor

    @property
    def host(self) -> StepLayout[Int64]:
        return StepLayout(**{key: part.numpy() for key, part in vars(self.step).items()})

    @property
    def work(self) -> list[int]:
        """Amount of work of each row: tokens times places, over all heads."""
        tokens = (self.step.query_offsets[1:] - self.step.query_offsets[:-1]).tolist()
        held = (self.step.trunks + self.step.nodes).tolist()
        shape = self.shape
        return [n * p * shape.heads * shape.dim for n, p in zip(tokens, held, strict=True)]


def case_of(shape: Shape, rows: Sequence[Row], gap: int = 0, backwards: bool = False) -> Case:
    kv_starts = kv_starts_of(rows, [gap] * len(rows), backwards)
    step, sees = layout_of(rows, kv_starts), visible(rows, kv_starts, shape.window)
    make, end = torch.Generator().manual_seed(len(step.slots)), int(step.slots.max()) + 1 + gap
    pool = torch.randn((end + 1, 2, shape.kv_heads, shape.dim), generator=make)
    query = torch.randn((len(step.slots), shape.heads, shape.dim), generator=make)
    return Case(shape, step, sees, pool.to(shape.dtype), query.to(shape.dtype))


def defined(case: Case) -> Tensor:
    shape = case.shape
    return by_definition(case.query, case.pool, case.sees, shape.dim**-0.5, shape.softcap)


class Eager:
    """A recorder of graphs that runs the recorded work again and counts the runs."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, run: Any) -> Any:
        self.recorded += 1
        run()
        return run

    def wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def parents_of(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.integers(0, most).flatmap(
        lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))
    )


def rows_of(most_rows: int, cached: int, brought: int, nodes: int) -> st.SearchStrategy[list[Row]]:
    row = st.tuples(
        st.integers(0, cached), st.one_of(st.just(1), st.integers(1, brought)), parents_of(nodes)
    )
    return st.lists(row, min_size=1, max_size=most_rows)
