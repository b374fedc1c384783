"""Tests that fused tree attention equals its definition, on a GPU or in Triton's interpreter.

A machine with Triton and no GPU runs this file with TRITON_INTERPRET=1. `benchmarks/gpu/gpu.py`
runs it without any conftest, on machines that have no Redis and no Ray.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tree_layouts import Case, Row, Shape, case_of, defined, layout_of, off, on, rows_of

from tasc_engine.config import MAX_NODES
from tasc_engine.kernels.gpu import attention as tree_kernel

needs_triton = pytest.mark.skipif(
    not tree_kernel.available(),
    reason="Triton is not installed (CUDA builds of torch bring it), or there is neither a GPU "
    "nor TRITON_INTERPRET=1",
)
ON_GPU = torch.cuda.is_available() and not tree_kernel.INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
# Triton 3.9's interpreter multiplies bfloat16 as if its bits were integers.
HALF = torch.float16 if tree_kernel.INTERPRETED else torch.bfloat16
# Values are up to four; weights and answers are rounded to 8, 11 or 24 bits.
CLOSE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
# The interpreter takes milliseconds for each program of a grid, so that shapes and rows are small.
ROWS = rows_of(4, 150, 12, 9) if ON_GPU else rows_of(3, 90, 5, 7)


SHAPES = (
    Shape(1, 1, 16, torch.float32),
    Shape(8, 4, 32, HALF),
    Shape(4, 1, 80, torch.float16, window=5),  # Phi-2's head size
    Shape(4, 2, 128, HALF, window=40),
    Shape(2, 1, 256, torch.float32, window=9, softcap=2.0),
    Shape(40, 2, 24, torch.float32, softcap=0.5),  # more heads share keys than a tile holds
)
MODELS = (
    Shape(14, 2, 64, HALF),  # Qwen2.5-0.5B
    Shape(9, 3, 64, torch.float16),  # SmolLM2-135M
    Shape(14, 2, 64, torch.float32),
)


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests run; they do if no conftest adds the option."""
    return bool(request.config.getoption("--all", default=True))


@pytest.fixture
def plain(everything: bool) -> Shape:
    """A shape in float32 without a window; it has few heads if it runs daily."""
    return MODELS[2] if everything else Shape(4, 1, 64, torch.float32)


def params(shapes: tuple[Shape, ...], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(shape, id=str(shape), marks=marks) for shape in shapes]


MORE_HEADS = pytest.mark.slow("other shapes with more heads")


def attended(case: Case, longest: int) -> torch.Tensor:
    # On the device too the query's heads lie between those of others, as in the engine.
    query, shape = case.query, case.shape
    between = torch.cat((query[:, :1], query, query[:, :1]), 1).to(DEVICE)[:, 1:-1]
    found = tree_kernel.attend(
        between, case.pool.to(DEVICE), on(case.step, DEVICE), shape.dim**-0.5, longest,
        shape.window, shape.softcap,
    )  # fmt: skip
    return found.double().cpu()


def error(shape: Shape, rows: list[Row], longest: int, wrong: int = 0) -> float:
    """The greatest difference; ``wrong`` bits of the last token's tree are turned."""
    case = case_of(shape, rows, gap=9)
    tree = case.step.tree.clone()
    tree[-1] ^= wrong
    return off(attended(replace(case, step=replace(case.step, tree=tree)), longest), defined(case))


@needs_triton
@pytest.mark.parametrize("shape", [*params(SHAPES), *params(MODELS, MORE_HEADS)])
def test_attention_of_trees_and_chunks_equals_the_reference(shape, everything) -> None:
    """A ``longest`` of 1 leaves contexts whole; greater values cut them into parts."""

    @seed(int(os.environ.get("TASC_TEST_SEED", "0")))
    @settings(max_examples=12 if everything else 1, database=None, deadline=None)
    @given(rows=ROWS, longest=st.sampled_from([1, 200, 2048] if ON_GPU else [1, 200]))
    def attends(rows, longest) -> None:
        assert error(shape, rows, longest) < CLOSE[shape.dtype]

    attends()
    mixed: list[Row] = [(66, 2, (-1, 0, -1, 2)), (0, 5, ()), (20, 1, (-1, -1, 0))]
    for longest in (1, 200):
        assert error(shape, mixed, longest) < CLOSE[shape.dtype]


@needs_triton
@pytest.mark.parametrize(
    "shape",
    [
        *params((Shape(2, 1, 32, HALF), Shape(2, 1, 128, HALF, window=40))),
        *params((SHAPES[1], SHAPES[3]), MORE_HEADS),
    ],
)
def test_attention_of_a_prompt_chunk_with_draft_is_exact(shape) -> None:
    chain = tuple(range(-1, 31))
    rows: list[Row] = [(0, 256 if ON_GPU else 40, chain), (300, 1, ()), (7, 1, (-1, -1, 0, 1))]
    assert error(shape, rows, 300) < CLOSE[shape.dtype]


@needs_triton
@pytest.mark.parametrize("longest", [64, 128, 192, 256])
def test_attention_is_exact_at_the_edges_of_splits(longest) -> None:
    """One to four parts, each of whole blocks of 64 keys."""
    rows: list[Row] = [(n, 1, ()) for n in (62, 63, 64, 126, 127, 128, 190, 191, 192, 255, 256)]
    assert error(SHAPES[0], rows, longest) < CLOSE[torch.float32]


@needs_triton
def test_attention_is_exact_for_the_maximum_number_of_nodes(plain: Shape) -> None:
    """The last node is a child of the first; bit 62 is the highest except for the sign."""
    parents = (-1, *range(61), 0)
    assert len(parents) == MAX_NODES
    assert error(plain, [(3, 1, parents)], 64) < CLOSE[torch.float32]


@needs_triton
def test_wrong_tree_bit_is_detected(plain: Shape) -> None:
    """Positive control: the results compared above depend on each bit."""
    rows: list[Row] = [(20, 1, (-1, 0, -1, 2))]
    assert error(plain, rows, 512) < CLOSE[torch.float32]
    for bit in range(4):
        assert error(plain, rows, 512, wrong=1 << bit) > 1e-2


@needs_triton
def test_empty_and_other_rows_do_not_affect_attention(plain: Shape) -> None:
    """A bucket has unused rows, and values outside a row's places are never read."""
    case = case_of(plain, [(5, 1, (-1, 0)), (70, 2, ())], gap=20)
    layout, before, pool = case.step, attended(case, 512), case.pool.clone()
    used = torch.zeros(len(pool), dtype=torch.bool)
    used[[place for places in case.sees for place in places]] = True
    pool[~used] = torch.nan
    none, last = torch.zeros(3, dtype=torch.int64), layout.query_offsets[-1:].expand(3)
    more = replace(
        layout,
        query_offsets=torch.cat((layout.query_offsets, last)),
        kv_starts=torch.cat((layout.kv_starts, none)),
        trunks=torch.cat((layout.trunks, none)),
        nodes=torch.cat((layout.nodes, none)),
    )
    assert torch.allclose(attended(replace(case, pool=pool, step=more), 512), before, atol=1e-6)


def test_unsupported_attention_is_refused() -> None:
    layout = layout_of([(1, 1, ())], [0])
    pool = torch.zeros((9, 2, 2, 16), dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        tree_kernel.attend(torch.zeros((1, 4, 16), dtype=torch.float64), pool, layout, 1.0, 8)
    with pytest.raises(ValueError, match="3 query heads"):
        tree_kernel.attend(torch.zeros((1, 3, 16)), pool.float(), layout, 1.0, 8)
    with pytest.raises(ValueError, match="in memory"):
        tree_kernel.attend(torch.zeros((1, 4, 32))[..., ::2], pool.float(), layout, 1.0, 8)
    assert not tree_kernel.available(torch.float64)
