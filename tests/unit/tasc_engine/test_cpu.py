"""Tests that compiled attention and layers of the CPU equal their definitions."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from tree_layouts import Case, Row, Shape, case_of, defined, off, rows_of

from tasc_engine.config import MAX_NODES
from tasc_engine.kernels.cpu import attention as cpu_rows
from tasc_engine.kernels.cpu.compiling import ENGINE, ROOMS
from tasc_engine.kernels.torch_attention import RowByRow
from tasc_engine.kv.cache import RowCache, on_device
from tasc_engine.layout import lay_out, plain_batch
from tasc_engine.model import operations
from tasc_engine.model.operations import (
    CompiledOperations,
    Norm,
    TensorOperations,
    choose,
    greatest,
)

COMPILED, TORCHS = 1 << 60, 0  # amount of work from which torch's attention is used
# Values are up to four; compiled code rounds the answer only, torch's own its weights too.
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TORCHS_CLOSE = {**CLOSE, torch.float16: 1.6e-2, torch.bfloat16: 0.12}
CAPPED_CLOSE = 2e-6  # torch's path takes the softmax of capped scores in float32, as models do


SHAPES = (
    Shape(1, 1, 8),
    Shape(6, 2, 8, window=3, softcap=0.7),
    Shape(4, 4, 8, torch.bfloat16, window=30),
    Shape(9, 3, 32, torch.float32, softcap=30.0),
    Shape(5, 5, 20, torch.float16, window=9, softcap=2.0),
    Shape(300, 3, 8),  # one token at a time is more than is usually taken together
    Shape(40, 2, 8, window=4),  # a long draft is taken in parts
)
MORE = (
    Shape(4, 4, 24, torch.bfloat16, window=30),
    Shape(8, 2, 40, torch.float16),
    Shape(14, 2, 64, torch.bfloat16),  # Qwen2.5-0.5B
    Shape(4, 1, 80, torch.float32, window=5),
    Shape(9, 3, 64, torch.float32, softcap=30.0),
)
PLAIN = SHAPES[0]


def torchs_close(shape: Shape) -> float:
    close = TORCHS_CLOSE[shape.dtype]
    return close if shape.softcap is None else max(close, CAPPED_CLOSE)


compiling = pytest.mark.slow("each is compiled for seconds; every dtype is daily")
by_shape = pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=compiling) for shape in MORE)], ids=str
)
by_way = pytest.mark.parametrize("much", [COMPILED, TORCHS], ids=["compiled", "torchs"])


def cache_of(case: Case) -> RowCache:
    """Begins the case's step in a cache of two layers; the case's values are in the second."""
    cache = RowCache(2, len(case.pool) - 1)
    cache.begin(case.host, case.step)
    cache.pool(0, case.shape.kv_heads, case.shape.dim, case.pool)
    cache.paste(0, torch.stack((case.pool.flip(0), case.pool)))
    return cache


def attended(case: Case, much: int, cache: RowCache | None = None) -> Tensor:
    shape, cache = case.shape, cache or cache_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_rows, "_MUCH", much)
        patch.setattr(cpu_rows, "_MANY", 0)
        found = cache.attend(1, case.query, shape.dim**-0.5, shape.window, shape.softcap)
    assert found.dtype == shape.dtype
    return found.clone()


def check(case: Case) -> None:
    expected, shape, one_by_one = defined(case), case.shape, RowByRow(case.pool[None])
    compiled, torchs = attended(case, COMPILED), attended(case, TORCHS)
    assert off(compiled, expected) < CLOSE[shape.dtype]
    assert off(torchs, expected) < torchs_close(shape)
    one_by_one.begin(case.host, case.step)
    alone = one_by_one.attend(0, case.query, shape.dim**-0.5, shape.window, shape.softcap)
    assert torch.equal(alone, torchs)
    some = sorted(case.work)[len(case.work) // 2]
    mixed = attended(case, some).split(case.step.query_offsets.diff().tolist())
    for row, part in enumerate(mixed):
        part_of = slice(case.step.query_offsets[row], case.step.query_offsets[row + 1])
        assert torch.equal(part, (torchs if case.work[row] >= some else compiled)[part_of])


@by_shape
def test_attention_of_trees_and_chunks_equals_the_reference(shape, examples) -> None:
    rows = rows_of(4, 60, 25, MAX_NODES)

    @examples(8, 25, rows=rows, gap=st.integers(0, 2), backwards=st.booleans())
    def attends(rows, gap, backwards) -> None:
        check(case_of(shape, rows, gap, backwards))


@by_shape
def test_attention_of_long_chunk_and_long_draft_is_exact(shape) -> None:
    """The draft's last node is a child of its first: bit 62 is the highest except for the sign."""
    deep = (-1, *range(MAX_NODES - 2), 0)
    check(case_of(shape, [(3, 70, tuple(range(-1, 30))), (90, 1, ()), (20, 1, deep)]))


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("heads", [1, 64, 128])
def test_sliding_window_is_exact_for_a_node_packed_after_a_deeper_node(heads, window) -> None:
    """The first of the tokens processed together is not always at the earliest position."""
    shape = Shape(heads, 1, 8, window=window)
    check(case_of(shape, [(9, 1, (-1, 0, 1, 2, -1, -1, 4, 0)), (5, 2, (-1, 0, 1, 2, 3, -1))]))


@by_way
@by_shape
def test_slots_of_other_rows_do_not_affect_attention(shape, much) -> None:
    rows: list[Row] = [(7, 1, (-1, 0, -1)), (30, 3, ()), (0, 5, (-1, -1))]
    for row in range(len(rows)):
        for gap in (0, 1):
            case = case_of(shape, rows, gap, backwards=row == 1)
            begin, end = case.step.query_offsets[row : row + 2].tolist()
            held = {place for places in case.sees[begin:end] for place in places}
            first = int(case.step.kv_starts[row])
            own = set(range(first, first + sum(rows[row][:2]) + len(rows[row][2])))
            assert held <= own
            before = attended(case, much)[begin:end]
            others = torch.tensor([place not in own for place in range(len(case.pool))])
            pool, query = case.pool.clone(), case.query.clone()
            pool[others] = torch.finfo(shape.dtype).max
            query[:begin] = query[end:] = -torch.inf
            huge = attended(replace(case, pool=pool, query=query), much)[begin:end]
            assert torch.equal(huge, before)


@by_way
def test_every_visible_slot_affects_attention(much) -> None:
    """Positive control: a changed key or value affects exactly the tokens that see its place."""
    case = case_of(PLAIN, [(3, 2, (-1, 0, -1)), (2, 1, (-1,))])
    before = attended(case, much)
    for place in range(len(case.pool)):
        for part in (0, 1):
            pool = case.pool.clone()
            pool[place, part] += 1
            changed = (attended(replace(case, pool=pool), much) != before).flatten(1).any(1)
            assert changed.tolist() == [place in places for places in case.sees]


@by_way
@by_shape
def test_cached_prefix_values_are_attended_to_and_nan_is_stored_as_zero(shape, much) -> None:
    case = case_of(shape, [(6, 2, (-1, 0)), (0, 1, ()), (11, 1, (-1, -1))], gap=1)
    cache, places = cache_of(case), case.step.slots
    make = torch.Generator().manual_seed(0)
    kv = torch.randn((len(places), 2, shape.kv_heads, shape.dim), generator=make).to(shape.dtype)
    for n, odd in enumerate([torch.nan, torch.inf, -torch.inf]):
        kv[2 * n, n % 2, 0, n] = odd
        kv[2 * n + 1, :, -1, -1 - n] = odd
    cache.keep(1, kv)
    pool = case.pool.clone()
    pool[places] = torch.where(kv.isfinite(), kv, 0)
    assert torch.equal(cache.copied(0, len(pool))[1], pool)
    assert (cache.copied(0, len(pool))[1, places] == 0).sum() == 9
    found = attended(case, much, cache)
    assert off(found, defined(replace(case, pool=pool))) < torchs_close(shape)


def test_attention_is_exact_after_a_step_of_another_size() -> None:
    """A step reuses the memory of the previous step, which may have been shorter or longer."""
    shape, cache = Shape(6, 2, 8), RowCache(1, 200)
    steps: list[list[Row]] = [
        [(9, 1, (-1, 0))], [(0, 40, ()), (30, 1, (-1,))], [(1, 1, ())], [(60, 12, (-1, 0, -1))],
        [(60, 12, (-1, 0, -1))], [(2, 1, (-1, -1)), (0, 1, ())],
    ]  # fmt: skip
    for rows in steps:
        case = case_of(shape, rows)
        cache.begin(case.host, case.step)
        cache.pool(0, shape.kv_heads, shape.dim, case.pool)
        cache.paste(0, case.pool[None])
        for query in (case.query, -case.query, case.query.flip(1).permute(1, 0, 2).contiguous()):
            asked = query if len(query) == len(case.query) else query.permute(1, 0, 2)
            found = cache.attend(0, asked, shape.dim**-0.5)
            assert off(found, defined(replace(case, query=asked))) < CLOSE[shape.dtype]


def test_cache_moves_precede_attention() -> None:
    case = case_of(PLAIN, [(12, 1, ())])
    cache = cache_of(case)
    moves = torch.tensor([[9, 7, 4], [8, 6, 9]])  # one from where another goes
    step = replace(case.step, moves=moves)
    cache.begin(replace(case.host, moves=moves.numpy()), step)
    pool = case.pool.clone()
    pool[moves[1]] = case.pool[moves[0]]
    found = cache.attend(1, case.query, PLAIN.dim**-0.5)
    assert off(found, defined(replace(case, pool=pool))) < CLOSE[PLAIN.dtype]


# Relative to the greatest number: a few roundings to 53, 24, 11 or 8 bits.
CLOSE_LAYERS = {**CLOSE, torch.float32: 2e-6}
WIDTHS = (1, 5, 15, 16, 17, 31, 40, 64, 100)
HALVES = {torch.float16, torch.bfloat16}
by_dtype = pytest.mark.parametrize("dtype", CLOSE_LAYERS)
by_width = pytest.mark.parametrize("width", WIDTHS)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=make, dtype=torch.float64) * scale


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert expected.isfinite().all()
    off = (found.double() - expected.double()).abs().max()
    return bool(off <= CLOSE_LAYERS[dtype] * expected.abs().max())


def pair(cos_sin: Tensor, heads: int, kv_heads: int) -> tuple[CompiledOperations, TensorOperations]:
    """Returns compiled operations in a dtype, and torch's in float64 for comparison."""
    slow = TensorOperations(cos_sin.double(), heads, kv_heads, nn.functional.silu)
    return CompiledOperations(cos_sin, heads, kv_heads), slow


def cos_sin_of(positions: int, dim: int, dtype: torch.dtype) -> Tensor:
    angles = torch.arange(positions)[:, None] * 0.7 ** torch.arange(dim // 2)[None]
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


@by_dtype
@by_width
@pytest.mark.parametrize(("epsilon", "scale"), [(1e-5, 30.0), (0.25, 1e-2)])
def test_add_and_norm_equals_torch(epsilon, scale, width, dtype) -> None:
    fast, slow = pair(cos_sin_of(4, 8, dtype), 2, 1)
    norm = Norm(drawn(width, seed=1).to(dtype), epsilon)
    exact = Norm(norm.wide.double(), epsilon)
    hidden = drawn(7, width, scale=scale).to(dtype)
    expected = hidden.double().clone()
    for seed in (None, 2, 3):  # the stream goes on: a layer adds to what the last one left
        delta = None if seed is None else drawn(7, width, seed=seed, scale=scale).to(dtype)
        before = hidden.clone()
        found = fast.add_and_norm(hidden, delta, norm)
        wide = None if delta is None else delta.double()
        assert close(found, slow.add_and_norm(expected, wide, exact), dtype)
        assert close(hidden, expected, dtype)
        assert torch.equal(hidden, before if delta is None else before + delta)


def test_add_and_norm_of_a_new_stream_ignores_the_previous_stream() -> None:
    fast, slow = pair(cos_sin_of(4, 8, torch.float64), 2, 1)
    norm = Norm(drawn(20), 1e-6)
    for seed, rows in ((1, 3), (2, 3), (3, 5), (4, 3)):
        hidden = drawn(rows, 20, seed=seed)
        found = fast.add_and_norm(hidden, None, norm)
        assert close(found, slow.add_and_norm(hidden, None, norm), torch.float64)


def begun(dtype: torch.dtype, kv_heads: int, dim: int) -> RowCache:
    """A cache of two rows at places apart in a step of three tokens each."""
    cache = RowCache(2, 24)
    layout = lay_out(plain_batch([13, 1], 4, np.array([1, 2, 3], np.int32)))
    cache.begin(layout, on_device(layout, torch.device("cpu")))
    cache.pool(0, kv_heads, dim, torch.zeros(1, dtype=dtype))
    cache.paste(0, drawn(2, 25, 2, kv_heads, dim, seed=9).to(dtype))
    return cache


def rotated(
    qkv: Tensor, heads: int, kv_heads: int, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compiled code's queries and pool, then those of torch."""
    dim, found = qkv.shape[1] // (heads + 2 * kv_heads), []
    operations = pair(cos_sin_of(9, dim, qkv.dtype), heads, kv_heads)
    for own, dtype in zip(operations, (qkv.dtype, torch.float64), strict=True):
        norm = None if weight is None else Norm(weight.to(dtype), 1e-5)
        cache = begun(dtype, kv_heads, dim)
        query = own.apply_rope_and_write_kv(1, qkv.to(dtype).clone(), norm, cache)
        found += [query.clone(), cache.copied(0, 25)]
    return tuple(found)


@by_dtype
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [2, 8, 16, 24, 32, 34, 40, 64, 80, 96])
def test_rope_norm_and_kv_write_equal_torch(dim, normed, dtype) -> None:
    heads, kv_heads = 6, 2
    qkv = drawn(6, (heads + 2 * kv_heads) * dim, scale=3.0).to(dtype)
    weight = drawn(heads + kv_heads, dim, seed=1).to(dtype) if normed else None
    query, pool, expected, expected_pool = rotated(qkv, heads, kv_heads, weight)
    assert close(query, expected, dtype)
    assert close(pool[1], expected_pool[1], dtype)
    before = begun(dtype, kv_heads, dim).copied(0, 25)
    assert torch.equal(pool[0], before[0])
    entered = (pool[1] != before[1]).flatten(1).any(1)
    assert entered.nonzero()[:, 0].tolist() == [5, 6, 7, 17, 18, 19]
    values = qkv.view(6, -1, dim)[:, -kv_heads:]
    assert torch.equal(pool[1, [17, 18, 19, 5, 6, 7], 1], values)


@pytest.mark.parametrize("dim", [8, 16, 34])
@pytest.mark.parametrize("normed", [False, True])
@by_dtype
def test_nan_keys_and_values_are_stored_as_zeros(dtype, normed, dim) -> None:
    """A rotated value mixes two places of a head, so that a NaN affects both."""
    qkv = drawn(6, 4 * dim).to(dtype)
    for token, (head, place, value) in enumerate(
        [(2, 0, torch.nan), (2, dim - 1, torch.inf), (3, 1, torch.nan), (3, dim - 2, -torch.inf)]
    ):
        qkv[token, head * dim + place] = value
    weight = drawn(3, dim, seed=1).to(dtype) if normed else None
    _, pool, _, expected = rotated(qkv, 2, 1, weight)
    assert pool.isfinite().all()
    assert close(pool[1], expected[1], dtype)
    zeros = (pool[1, [17, 18, 19, 5]] == 0).sum((1, 2, 3)).tolist()
    assert zeros == ([dim, dim, 1, 1] if normed else [2, 2, 1, 1])


def test_keys_beyond_the_range_of_the_dtype_are_stored_as_zeros() -> None:
    qkv = torch.full((6, 3 * 16), 60_000.0, dtype=torch.float16)
    fast, _ = pair(cos_sin_of(9, 16, torch.float16), 1, 1)
    cache = begun(torch.float16, 1, 16)
    fast.apply_rope_and_write_kv(0, qkv, None, cache)
    kept = cache.copied(0, 25)[0, [17, 18, 19, 5, 6, 7]]
    assert kept.isfinite().all()
    assert (kept[:, 1] == 60_000).all()
    assert (kept[:, 0] == 0).any()
    assert (kept[:, 0] != 0).any()


@by_dtype
@by_width
def test_gate_equals_torch(width, dtype) -> None:
    """Successive calls have different numbers of tokens and reuse memory."""
    fast, slow = pair(cos_sin_of(4, 8, dtype), 2, 1)
    for rows, scale in ((5, 1.0), (2, 30.0), (8, 1000.0)):
        qkv = drawn(rows, 2 * width, scale=scale).to(dtype)
        exact = slow.gate(qkv.double())
        if scale < 1000 or dtype not in HALVES:
            assert close(fast.gate(qkv), exact, dtype)
        qkv[:, width:] = 1.0
        assert close(fast.gate(qkv), slow.gate(qkv.double()), dtype)


def first_greatest(lines: list[list[float]]) -> list[int]:
    found = []
    for line in lines:
        best = 0
        for place, logit in enumerate(line):
            best = place if logit > line[best] else best
        found.append(-1 if any(logit != logit for logit in line) else best)
    return found


# These few values exist in each dtype, so that most lines have several greatest ones.
LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, torch.inf, -torch.inf])
MOSTLY_NUMBERS = st.lists(LOGITS, min_size=1, max_size=300).flatmap(
    lambda line: st.tuples(st.just(line), st.none() | st.integers(0, len(line) - 1))
)


def choices(logits: Tensor) -> list[list[int]]:
    found = choose(logits), greatest(logits), operations.first_greatest(logits).numpy()
    assert {chosen.dtype for chosen in found} == {np.dtype(np.int64)}
    return [chosen.tolist() for chosen in found]


@by_dtype
@settings(deadline=None)
@given(MOSTLY_NUMBERS)
def test_first_of_equal_greatest_logits_is_chosen_but_no_token_if_a_logit_is_nan(dtype, drawn_line):
    line, nowhere = drawn_line
    lines = [line, line[::-1], [-torch.inf] * len(line), sorted(line)]
    if nowhere is not None:
        lines.append([*line[:nowhere], torch.nan, *line[nowhere + 1 :]])
    expected = first_greatest(lines)
    assert choices(torch.tensor(lines, dtype=torch.float64).to(dtype)) == [expected] * 3


@by_dtype
@pytest.mark.parametrize("width", [1, 15, 16, 17, 128, 129, 149, 160, 300])
def test_greatest_logit_and_single_nan_are_found_at_every_position(width, dtype) -> None:
    for odd, expected in ((torch.nan, [-1] * width), (0.5, [*range(width)])):
        logits = torch.full((width, width), -1.0, dtype=dtype)
        logits.fill_diagonal_(odd)
        assert choices(logits) == [expected] * 3


@by_dtype
def test_choosing_supports_zero_rows_and_strided_columns(dtype) -> None:
    logits = drawn(6, 40).to(dtype)
    assert choices(logits[:0]) == [[], [], []]
    expected = first_greatest(logits[:, 3:30].double().tolist())
    assert choices(logits[:, 3:30]) == [expected] * 3


def test_changed_compiled_function_starts_a_new_cache() -> None:
    """numba does not notice changes in functions that a cached one calls from another file."""
    users = {
        path.parent.relative_to(ENGINE).as_posix()
        for path in ENGINE.rglob("*.py")
        if re.search(r"^@(arithmetic|borrowing)$", path.read_text("utf-8"), re.MULTILINE)
    }
    assert users
    assert users <= set(ROOMS)
