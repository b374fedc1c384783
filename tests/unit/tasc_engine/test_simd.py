"""Tests that SIMD lanes convert exactly like torch, and the accuracy of their functions.

`test_cpu` tests their arithmetic: attention and layers equal their references.
"""

from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasc_engine.kernels.cpu import simd
from tasc_engine.kernels.cpu.simd import WIDTH

# The package compiles with these options: sums may be taken in any order.
compiled = numba.njit(_nrt=False, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})

SHORT = {torch.bfloat16: np.uint16, torch.float16: np.int16}
FLOATS = (np.float32, np.float64)
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@compiled
def _to_float32_simd(source, start, out):
    for i in range(0, len(out), WIDTH):
        simd.store(out, i, simd.load(source, start + i))


@compiled
def _to_float32_each(source, start, out):
    for i in range(len(out)):
        out[i] = simd.to_float32(source[start + i])


@compiled
def _round_simd(source, out, start):
    for i in range(0, len(source), WIDTH):
        simd.store(out, start + i, simd.load(source, i))


@compiled
def _round_each(source, out, start):
    for i in range(len(source)):
        out[start + i] = simd.round_to_storage(source[i], out[0])


def of_each(operation: Any) -> Any:
    """Returns compiled code that stores the result of an operation on the lanes of its inputs."""

    @compiled
    def one(x, out):
        for i in range(0, len(out), WIDTH):
            simd.store(out, i, operation(simd.load(x, i)))

    return one


def of_pairs(operation: Any) -> Any:
    @compiled
    def two(x, y, out):
        for i in range(0, len(out), WIDTH):
            simd.store(out, i, operation(simd.load(x, i), simd.load(y, i)))

    return two


_exp, _finite, _double = map(of_each, (simd.exp, simd.finite, simd.double))
_maximum = of_pairs(simd.maximum)


_greatest = compiled(lambda x: simd.greatest(simd.load(x, 0)))
_only = compiled(lambda x, bits, out: simd.store(out, 0, simd.only(simd.load(x, 0), bits)))


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Asserts bitwise equality, except that all NaNs are equal."""
    assert found.dtype == expected.dtype
    nan = np.isnan(expected)
    assert (np.isnan(found) == nan).all()
    bits = np.uint32 if found.dtype == np.float32 else np.uint64
    assert (found.view(bits)[~nan] == expected.view(bits)[~nan]).all()


def hard(dtype: torch.dtype) -> np.ndarray:
    """``float32[*]``: the numbers of a dtype, those halfway between two, their neighbours, and
    random bits of all sizes."""
    short = torch.from_numpy(PATTERNS.view(np.int16)).view(dtype).double().numpy()
    whole = np.sort(short[np.isfinite(short)])
    ties = ((whole[:-1] + whole[1:]) / 2).astype(np.float32)
    above, below = (np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf))
    spread = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    with np.errstate(over="ignore"):
        own = short.astype(np.float32)
    beyond = np.array([np.inf, -np.inf, np.nan, -np.nan, 65519.99, 65520, 3.4e38, 1e-45, -0.0])
    quiet = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001, 0x7F80FFFF], np.uint32)
    odd = beyond.astype(np.float32), spread.view(np.float32), quiet.view(np.float32)
    numbers = np.concatenate((own, ties, above, below, *odd))
    return np.pad(numbers, (0, -len(numbers) % WIDTH))


@pytest.mark.parametrize("start", [0, 1, 7])
@pytest.mark.parametrize("to_float32", [_to_float32_simd, _to_float32_each])
@pytest.mark.parametrize("dtype", SHORT)
def test_16_bit_patterns_convert_to_float32_like_torch(dtype, to_float32, start) -> None:
    bits = np.concatenate((PATTERNS[:start], PATTERNS)).view(SHORT[dtype])
    out = np.zeros(1 << 16, np.float32)
    to_float32(bits, start, out)
    same(out, torch.from_numpy(PATTERNS.view(np.int16)).view(dtype).float().numpy())


@pytest.mark.parametrize("start", [0, 1, 7])
@pytest.mark.parametrize("round_to_storage", [_round_simd, _round_each])
@pytest.mark.parametrize("dtype", SHORT)
def test_rounding_to_16_bits_equals_torch(dtype, round_to_storage, start) -> None:
    numbers = hard(dtype)
    out = np.zeros(start + len(numbers), SHORT[dtype])
    round_to_storage(numbers, out, start)
    assert not out[:start].any()
    found = torch.from_numpy(out[start:].view(np.int16).copy())
    expected = torch.from_numpy(numbers).to(dtype)
    nan = expected.isnan()
    assert nan.sum() > 100
    assert torch.equal(found.view(dtype).isnan(), nan)
    assert torch.equal(found[~nan], expected.view(torch.int16)[~nan])


@pytest.mark.parametrize("dtype", FLOATS)
def test_float32_and_float64_pass_unchanged(dtype) -> None:
    bits = np.uint32 if dtype == np.float32 else np.uint64
    numbers = np.random.default_rng(1).integers(0, np.iinfo(bits).max, 4096, bits).view(dtype)
    numbers[:8] = np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(dtype).smallest_subnormal, 1, -1
    for convert in (_to_float32_simd, _to_float32_each):
        out = np.zeros_like(numbers[3:19])
        convert(numbers, 3, out)
        same(out, numbers[3:19])
    for convert in (_round_simd, _round_each):
        out = np.zeros(4096 + 5, dtype)
        convert(numbers, out, 5)
        same(out[5:], numbers)


@pytest.mark.parametrize(("dtype", "limit"), [(np.float32, 87), (np.float64, 708)])
def test_exp_is_accurate(dtype, limit) -> None:
    draw = np.random.default_rng(2)
    size = 10.0 ** draw.uniform(-9, np.log10(limit), 1 << 16) * draw.choice([-1, 1], 1 << 16)
    x = np.concatenate((np.linspace(-limit, limit, 1 << 17)[1:-1], size, [0.0, -0.0])).astype(dtype)
    out = np.zeros_like(x)
    _exp(x, out)
    off = out / np.exp(x.astype(np.float64)) - 1
    assert np.abs(off).max() < 2 * np.finfo(dtype).eps
    assert (out[-2:] == 1).all()
    low = np.linspace(-800, -80, 1 << 12).astype(dtype)  # below its range: zero
    out = np.zeros_like(low)
    _exp(low, out)
    assert (out >= 0).all()
    off = np.abs(out - np.exp(low.astype(np.float64)))
    assert off.max() < max(2 * np.finfo(dtype).smallest_normal, np.exp(-80.0) * 1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_exp_is_defined_everywhere(dtype) -> None:
    most, least = np.finfo(dtype).max, np.finfo(dtype).smallest_normal
    x = np.array([np.nan, -np.inf, -most, -1000, np.inf, most, 1e5, 800, -0.0, least], dtype)
    out = np.zeros(WIDTH, dtype)
    _exp(np.pad(x, (0, WIDTH - len(x))), out)
    assert np.isnan(out[0])
    assert (out[1:4] == 0).all()
    assert np.isfinite(out[4:8]).all()
    assert (out[4:8] > np.sqrt(most)).all()
    assert (out[8:] == 1).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_maximum_and_nan_are_found_in_any_lane(dtype) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, 1.5, -2.5, 1e30, -1e30], dtype)
    x, y = (a.ravel().copy() for a in np.meshgrid(odd, odd))
    out = np.zeros_like(x)
    _maximum(x, y, out)
    assert np.array_equal(out, np.maximum(x, y), equal_nan=True)
    for lane in range(WIDTH):
        for value in odd:
            one = np.full(WIDTH, -3, dtype)
            one[lane] = value
            assert np.array_equal(_greatest(one), one.max(), equal_nan=True)
    assert _greatest(np.full(WIDTH, -np.inf, dtype)) == -np.inf


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.floats(width=32), min_size=WIDTH, max_size=WIDTH), st.integers(0, 2**32 - 1))
def test_masked_or_non_finite_lanes_are_replaced(values, bits):
    stays = np.array([bits >> lane & 1 for lane in range(WIDTH)], bool)
    for dtype in FLOATS:
        x = np.array(values, dtype)
        out, wide = np.zeros_like(x), np.zeros(WIDTH)
        _only(x, bits, out)
        same(out, np.where(stays, x, dtype(-np.inf)))
        _finite(x, out)
        assert (out == np.where(np.isfinite(x), x, 0)).all()
        _double(x, wide)
        same(wide, x.astype(np.float64))
