"""What this machine lets a plain step take at least: its weights read once, its products done.

Bandwidth is that of reading as many bytes as the weights have, again and again, so that caches help
as they help a model; a copy counts its bytes twice. The matrix rate is that of one big product in
the same dtype. Attention, norms and the choice of tokens are left out; reading and products are
taken to overlap.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_SIDE, _REPEATS = 2048, 7


@dataclass(frozen=True)
class Ceiling:
    """Bytes of the weights a step reads, bytes and operations a second, for ``batch`` rows."""

    weight_bytes: int
    weights: int
    bandwidth: float
    rate: float
    batch: int = 8

    @property
    def step_seconds(self) -> float:
        products = 2 * self.weights * self.batch / self.rate
        return max(self.weight_bytes / self.bandwidth, products)

    @property
    def steps_per_second(self) -> float:
        return 1 / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.step_seconds


def ceiling(model: Any, dtype: torch.dtype, threads: int) -> Ceiling:
    """Of a transformers model, whatever dtype it is in."""
    torch.set_num_threads(threads)
    weights = sum(p.numel() for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if not tied:  # a step looks up a few lines of the input embeddings
        weights -= model.get_input_embeddings().weight.numel()
    size = weights * dtype.itemsize
    return Ceiling(size, weights, bandwidth(size), matrix_rate(dtype))


def bandwidth(size: int) -> float:
    """Bytes a second of the faster of reading and copying ``size`` bytes."""
    source = torch.ones(max(size // 4, 1 << 20))
    target, one = torch.empty_like(source), torch.ones(1024)
    lines = source[: source.numel() // 1024 * 1024].view(-1, 1024)
    read = lines.numel() * 4 / best(lambda: lines @ one)
    return max(read, 2 * source.numel() * 4 / best(lambda: target.copy_(source)))


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations a second of a square product; an addition and a product are two."""
    a, b = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    return 2 * _SIDE**3 / best(lambda: a @ b)


def best(work: Callable[[], Any]) -> float:
    took = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took[1:])
