"""Layouts of packed trees by their description, and what attention over them says by definition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from tasc_engine.layout import StepLayout

# Of each row: tokens in the cache, tokens it brings, parents of its draft nodes behind them.
Row = tuple[int, int, Sequence[int]]


Layout = StepLayout[Tensor]


def on(layout: Layout, device: Any) -> Layout:
    return StepLayout(**{name: part.to(device) for name, part in vars(layout).items()})


def layout_of(rows: Sequence[Row], length: int) -> Layout:
    """Each row has ``length`` places of the pool and may emit."""
    positions, places, seen, tree, begins, looked_at = [], [], [], [], [0], []
    for row, (cached, brought, parents) in enumerate(rows):
        trunk, depths, bits = cached + brought, [], []
        for node, parent in enumerate(parents):
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        assert trunk + len(parents) <= length
        base = range(cached, trunk)
        positions += [*base, *(trunk - 1 + d for d in depths)]
        places += range(row * length + cached, row * length + trunk + len(parents))
        seen += [*(p + 1 for p in base), *(trunk for _ in parents)]
        tree += [0] * brought + bits
        looked_at += range(begins[-1] + brought - 1, len(positions))
        begins.append(len(positions))
    ids = [(7 * p + 3 * i) % 50 for i, p in enumerate(positions)]
    numbers = {
        "ids": ids, "positions": positions, "slots": places, "seen": seen, "tree": tree,
        "adapters": [0] * len(ids), "looked_at": looked_at, "begins": begins,
        "firsts": [row * length for row in range(len(rows))],
        "trunks": [cached + brought for cached, brought, _ in rows],
        "nodes": [len(parents) for _, _, parents in rows],
    }  # fmt: skip
    tensors = {name: torch.tensor(n, dtype=torch.int64) for name, n in numbers.items()}
    return StepLayout(**tensors, moves=torch.zeros((2, 0), dtype=torch.int64))


def visible(rows: Sequence[Row], length: int, window: int | None) -> list[list[int]]:
    """The cache places that each packed token sees, from parents and positions alone."""
    found = []
    for row, (cached, brought, parents) in enumerate(rows):
        trunk = cached + brought
        depth = [0] * len(parents)
        for own in range(cached, trunk):
            found.append([(p, p, own) for p in range(own + 1)])
        for node, parent in enumerate(parents):
            depth[node] = 1 if parent < 0 else depth[parent] + 1
            own, path, at = trunk - 1 + depth[node], [], node
            while at >= 0:
                path.append((trunk + at, trunk - 1 + depth[at], own))
                at = parents[at]
            found.append([*((p, p, own) for p in range(trunk)), *path])
        for n in range(len(found) - brought - len(parents), len(found)):
            found[n] = [
                row * length + place
                for place, position, own in found[n]
                if window is None or own - position < window
            ]
    return found


def by_definition(
    query: Tensor, pool: Tensor, sees: list[list[int]], scale: float, softcap: float | None
) -> Tensor:
    """``float64[N, heads, D]``, one token after the other."""
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
    """The greatest difference, infinite where there is no number."""
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


class Eager:
    """A recorder of graphs that runs again what it is told to record; it counts."""

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
