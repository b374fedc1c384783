"""What the fused kernels of a GPU compute is what tensor operations compute."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tasc_engine.gpu.attention import INTERPRETED, available
from tasc_engine.gpu.operations import FusedOperations
from tasc_engine.operations import Norm, TensorOperations

pytestmark = pytest.mark.skipif(
    not available(),
    reason="needs Triton and a GPU, or Triton and TRITON_INTERPRET=1, as in .ci/run",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter's products of bfloat16 are wrong.
CLOSE = {torch.float32: 1e-5, torch.float16 if INTERPRETED else torch.bfloat16: 2e-2}
TOKENS, PLACES = 5, 12


class Pools:
    """Keys and values of two layers; the positions and places of a step."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.all = torch.zeros((2, PLACES, 2, kv_heads, dim), dtype=dtype, device=DEVICE)
        self.device = SimpleNamespace(
            positions=torch.tensor([3, 4, 9, 0, 39], device=DEVICE),
            places=torch.tensor([7, 2, 5, 11, 0], device=DEVICE),
        )

    def pool(self, layer: int, *_: object) -> Tensor:
        return self.all[layer]

    def keep(self, layer: int, kv: Tensor) -> None:
        self.all[layer].index_copy_(0, self.device.places, kv.nan_to_num(0.0, 0.0, 0.0))


@pytest.fixture(params=[(14, 2, 64), (4, 2, 24)])
def shape(request) -> tuple[int, int, int]:
    return request.param


@pytest.fixture(params=CLOSE)
def dtype(request) -> torch.dtype:
    return request.param


def both(shape, dtype) -> tuple[FusedOperations, TensorOperations]:
    torch.manual_seed(0)
    heads, kv_heads, dim = shape
    turns = some((40, 2, dim), dtype)
    return FusedOperations(turns, heads, kv_heads), TensorOperations(
        turns, heads, kv_heads, functional.silu
    )


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=CLOSE[a.dtype], atol=CLOSE[a.dtype])


@pytest.mark.parametrize("adds", [False, True])
def test_the_stream_is_added_to_and_normed(shape, dtype, adds: bool) -> None:
    fused, plain = both(shape, dtype)
    width = shape[0] * shape[2]
    norm, hidden = Norm(some((width,), dtype), 1e-6), some((TOKENS, width), dtype)
    delta, copy = some((TOKENS, width), dtype) if adds else None, hidden.clone()
    close(fused.add_and_norm(hidden, delta, norm), plain.add_and_norm(copy, delta, norm))
    close(hidden, copy)


@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_turned_and_only_finite_keys_and_values_are_kept(shape, dtype, normed) -> None:
    fused, plain = both(shape, dtype)
    heads, kv_heads, dim = shape
    norm = Norm(some((heads + kv_heads, dim), dtype), 1e-6) if normed else None
    joined = some((TOKENS, (heads + 2 * kv_heads) * dim), dtype)
    joined[2, -1], joined[3, -2] = torch.nan, torch.inf
    ours, theirs = Pools(kv_heads, dim, dtype), Pools(kv_heads, dim, dtype)
    query = fused.turn_and_keep(1, joined.clone(), norm, ours)
    close(query, plain.turn_and_keep(1, joined.clone(), norm, theirs))
    close(ours.all, theirs.all)
    assert ours.all.isfinite().all()
    assert ours.all[1].abs().sum() > 0


def test_gates_are_multiplied(shape, dtype) -> None:
    fused, plain = both(shape, dtype)
    joined = some((TOKENS, 2 * 1500), dtype)
    close(fused.gate(joined), plain.gate(joined.clone()))
