"""Compiled layers say what tensor operations say in float64, to the precision of a dtype."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tasc_engine.attention import RowCache, on_device
from tasc_engine.cpu.operations import CompiledOperations, choose
from tasc_engine.layout import lay_out, plain_feed
from tasc_engine.operations import Norm, TensorOperations, greatest

# Of the greatest number: a few roundings to 53, 24, 11 or 8 bits.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WIDTHS = (1, 5, 15, 16, 17, 31, 40, 64, 100)
HALVES = {torch.float16, torch.bfloat16}
by_dtype = pytest.mark.parametrize("dtype", CLOSE)
by_width = pytest.mark.parametrize("width", WIDTHS)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=make, dtype=torch.float64) * scale


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert expected.isfinite().all()
    off = (found.double() - expected.double()).abs().max()
    return bool(off <= CLOSE[dtype] * expected.abs().max())


def pair(turns: Tensor, heads: int, kv_heads: int) -> tuple[CompiledOperations, TensorOperations]:
    """Compiled code in a dtype, and what it is compared with: torch in float64."""
    slow = TensorOperations(turns.double(), heads, kv_heads, nn.functional.silu)
    return CompiledOperations(turns, heads, kv_heads), slow


def turns_of(positions: int, dim: int, dtype: torch.dtype) -> Tensor:
    angles = torch.arange(positions)[:, None] * 0.7 ** torch.arange(dim // 2)[None]
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)


@by_dtype
@by_width
def test_a_norm_of_what_is_added_to(width, dtype) -> None:
    fast, slow = pair(turns_of(4, 8, dtype), 2, 1)
    norm = Norm(drawn(width, seed=1).to(dtype), 1e-5)
    exact = Norm(norm.wide.double(), 1e-5)
    hidden = drawn(7, width, scale=30.0).to(dtype)
    expected = hidden.double().clone()
    for seed in (None, 2, 3):  # the stream goes on: a layer adds to what the last one left
        delta = None if seed is None else drawn(7, width, seed=seed).to(dtype)
        before = hidden.clone()
        found = fast.add_and_norm(hidden, delta, norm)
        wide = None if delta is None else delta.double()
        assert close(found, slow.add_and_norm(expected, wide, exact), dtype)
        assert close(hidden, expected, dtype)
        assert torch.equal(hidden, before if delta is None else before + delta)


@by_dtype
def test_an_epsilon_counts_where_all_is_small(dtype) -> None:
    fast, slow = pair(turns_of(4, 8, dtype), 2, 1)
    norm, hidden = Norm(torch.ones(40, dtype=dtype), 0.25), drawn(3, 40, scale=1e-2).to(dtype)
    exact = Norm(norm.wide.double(), 0.25)
    found = fast.add_and_norm(hidden, None, norm)
    assert close(found, slow.add_and_norm(hidden.double(), None, exact), dtype)
    assert found.abs().max() < 0.1


def test_another_stream_is_not_taken_for_the_last_one() -> None:
    fast, slow = pair(turns_of(4, 8, torch.float64), 2, 1)
    norm = Norm(drawn(20), 1e-6)
    for seed, rows in ((1, 3), (2, 3), (3, 5), (4, 3)):
        hidden = drawn(rows, 20, seed=seed)
        found = fast.add_and_norm(hidden, None, norm)
        assert close(found, slow.add_and_norm(hidden, None, norm), torch.float64)


def begun(dtype: torch.dtype, kv_heads: int, dim: int) -> RowCache:
    """A cache of two rows at places apart in a step of three tokens each."""
    cache = RowCache(2, 24)
    layout = lay_out(plain_feed([13, 1], 4, np.array([1, 2, 3], np.int32)))
    cache.begin(layout, on_device(layout, torch.device("cpu")))
    cache.pool(0, kv_heads, dim, torch.zeros(1, dtype=dtype))
    cache.paste(0, drawn(2, 25, 2, kv_heads, dim, seed=9).to(dtype))
    return cache


def turned(
    joined: Tensor, heads: int, kv_heads: int, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compiled code's queries and pool, then those of torch."""
    dim, found = joined.shape[1] // (heads + 2 * kv_heads), []
    operations = pair(turns_of(9, dim, joined.dtype), heads, kv_heads)
    for own, dtype in zip(operations, (joined.dtype, torch.float64), strict=True):
        norm = None if weight is None else Norm(weight.to(dtype), 1e-5)
        cache = begun(dtype, kv_heads, dim)
        query = own.turn_and_keep(1, joined.to(dtype).clone(), norm, cache)
        found += [query.clone(), cache.copied(0, 25)]
    return tuple(found)


@by_dtype
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [2, 8, 16, 24, 32, 34, 40, 64, 80, 96])
def test_heads_are_normed_turned_and_kept(dim, normed, dtype) -> None:
    heads, kv_heads = 6, 2
    joined = drawn(6, (heads + 2 * kv_heads) * dim, scale=3.0).to(dtype)
    weight = drawn(heads + kv_heads, dim, seed=1).to(dtype) if normed else None
    query, pool, expected, expected_pool = turned(joined, heads, kv_heads, weight)
    assert close(query, expected, dtype)
    assert close(pool[1], expected_pool[1], dtype)
    before = begun(dtype, kv_heads, dim).copied(0, 25)
    assert torch.equal(pool[0], before[0])
    entered = (pool[1] != before[1]).flatten(1).any(1)
    assert entered.nonzero()[:, 0].tolist() == [5, 6, 7, 17, 18, 19]
    values = joined.view(6, -1, dim)[:, -kv_heads:]
    assert torch.equal(pool[1, [17, 18, 19, 5, 6, 7], 1], values)


@pytest.mark.parametrize("dim", [8, 16, 34])
@pytest.mark.parametrize("normed", [False, True])
@by_dtype
def test_keys_and_values_that_are_no_numbers_are_kept_as_zeros(dtype, normed, dim) -> None:
    """With the first half's partner: what is turned mixes two places of a head."""
    joined = drawn(6, 4 * dim).to(dtype)
    for token, (head, place, value) in enumerate(
        [(2, 0, torch.nan), (2, dim - 1, torch.inf), (3, 1, torch.nan), (3, dim - 2, -torch.inf)]
    ):
        joined[token, head * dim + place] = value
    weight = drawn(3, dim, seed=1).to(dtype) if normed else None
    _, pool, _, expected = turned(joined, 2, 1, weight)
    assert pool.isfinite().all()
    assert close(pool[1], expected[1], dtype)
    zeros = (pool[1, [17, 18, 19, 5]] == 0).sum((1, 2, 3)).tolist()
    assert zeros == ([dim, dim, 1, 1] if normed else [2, 2, 1, 1])


def test_keys_that_a_dtype_cannot_hold_are_kept_as_zeros() -> None:
    joined = torch.full((6, 3 * 16), 60_000.0, dtype=torch.float16)
    fast, _ = pair(turns_of(9, 16, torch.float16), 1, 1)
    cache = begun(torch.float16, 1, 16)
    fast.turn_and_keep(0, joined, None, cache)
    kept = cache.copied(0, 25)[0, [17, 18, 19, 5, 6, 7]]
    assert kept.isfinite().all()
    assert (kept[:, 1] == 60_000).all()
    assert (kept[:, 0] == 0).any()
    assert (kept[:, 0] != 0).any()


@by_dtype
@by_width
def test_gates_times_values(width, dtype) -> None:
    fast, slow = pair(turns_of(4, 8, dtype), 2, 1)
    for scale in (1.0, 30.0, 1000.0):
        joined = drawn(5, 2 * width, scale=scale).to(dtype)
        exact = slow.gate(joined.double())
        if scale < 1000 or dtype not in HALVES:
            assert close(fast.gate(joined), exact, dtype)
        joined[:, width:] = 1.0
        assert close(fast.gate(joined), slow.gate(joined.double()), dtype)


def test_memory_is_taken_anew_for_another_number_of_tokens() -> None:
    fast, slow = pair(turns_of(4, 8, torch.float64), 2, 1)
    for rows in (3, 1, 8, 3):
        joined = drawn(rows, 40, seed=rows)
        assert close(fast.gate(joined), slow.gate(joined), torch.float64)


def first_greatest(lines: list[list[float]]) -> list[int]:
    found = []
    for line in lines:
        best = 0
        for place, logit in enumerate(line):
            best = place if logit > line[best] else best
        found.append(-1 if any(logit != logit for logit in line) else best)
    return found


# Few different ones, all numbers of each dtype: most lines have several that are greatest.
LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, torch.inf, -torch.inf])
MOSTLY_NUMBERS = st.lists(LOGITS, min_size=1, max_size=300).flatmap(
    lambda line: st.tuples(st.just(line), st.none() | st.integers(0, len(line) - 1))
)


def choices(logits: Tensor) -> list[list[int]]:
    both = choose(logits), greatest(logits)
    assert {chosen.dtype for chosen in both} == {np.dtype(np.int64)}
    return [chosen.tolist() for chosen in both]


@by_dtype
@settings(deadline=None)
@given(MOSTLY_NUMBERS)
def test_the_first_of_the_greatest_is_chosen_and_nothing_beside_no_number(dtype, drawn_line):
    line, nowhere = drawn_line
    lines = [line, line[::-1], [-torch.inf] * len(line), sorted(line)]
    if nowhere is not None:
        lines.append([*line[:nowhere], torch.nan, *line[nowhere + 1 :]])
    expected = first_greatest(lines)
    for found in choices(torch.tensor(lines, dtype=torch.float64).to(dtype)):
        assert found == expected


@by_dtype
@pytest.mark.parametrize("width", [1, 15, 16, 17, 128, 129, 149, 160])
def test_a_single_one_that_is_no_number_is_found_anywhere(width, dtype) -> None:
    logits = torch.zeros((width, width), dtype=dtype)
    logits.fill_diagonal_(torch.nan)
    for found in choices(logits):
        assert found == [-1] * width


@by_dtype
@pytest.mark.parametrize("width", [1, 15, 17, 128, 149, 300])
def test_the_greatest_is_found_anywhere(width, dtype) -> None:
    logits = torch.full((width, width), -1.0, dtype=dtype)
    logits.fill_diagonal_(0.5)
    for found in choices(logits):
        assert found == list(range(width))


@by_dtype
def test_no_lines_choose_nothing_and_columns_of_a_wider_tensor_are_read_rightly(dtype) -> None:
    logits = drawn(6, 40).to(dtype)
    assert choices(logits[:0]) == [[], []]
    expected = first_greatest(logits[:, 3:30].double().tolist())
    assert choices(logits[:, 3:30]) == [expected] * 2
