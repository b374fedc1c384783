"""Steps of random weights, and the least time that a plain step can take on this machine.

The ceiling: the weights are read once and their products computed; both overlap. The bandwidth is
that of reading as many bytes as the weights have repeatedly, so that caches help as they help a
model; a copy counts its bytes twice. The matrix rate is that of one large product in the same
dtype, or in float32 where that is faster: on a processor without products of bfloat16 it is, by a
factor of 100. Attention, norms and the choice of tokens are left out.

The shapes are those of SmolLM2-135M and Qwen2.5-0.5B. Weights are random, as the cost of a step
does not depend on the text. Our engine and transformers step the same weights in this process, one
after the other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tasc_engine import EngineConfig, Target
from tasc_engine.step.cost import measure

CONTEXT, ROWS = 64, 8
SHAPES: dict[str, tuple[Any, Any]] = {
    "135m": (LlamaForCausalLM, LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )),
    "0.5b": (Qwen2ForCausalLM, Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    )),
}  # fmt: skip
_SIDE, _SMALL_SIDE, _CEILING_REPEATS, _STEP_REPEATS = 2048, 256, 7, 9


@dataclass(frozen=True)
class Ceiling:
    """Bytes of the weights that a step reads; bytes and operations per second; rows of a step."""

    weight_bytes: int
    weights: int
    bandwidth: float
    rate: float
    batch: int = ROWS

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
    """The ceiling of a transformers model computed in ``dtype``."""
    torch.set_num_threads(threads)
    weights = sum(p.numel() for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if not tied:  # a step looks up only a few rows of the input embeddings
        weights -= model.get_input_embeddings().weight.numel()
    size = weights * dtype.itemsize
    return Ceiling(size, weights, bandwidth(size), matrix_rate(dtype))


def bandwidth(size: int) -> float:
    """Bytes per second of reading or copying ``size`` bytes, whichever is faster."""
    source = torch.ones(max(size // 4, 1 << 20))
    target, one = torch.empty_like(source), torch.ones(1024)
    lines = source[: source.numel() // 1024 * 1024].view(-1, 1024)
    read = lines.numel() * 4 / best(lambda: lines @ one)
    return max(read, 2 * source.numel() * 4 / best(lambda: target.copy_(source)))


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations per second of a square product, where an addition and a product are two.

    A small product chooses the faster of ``dtype`` and float32.
    """

    def rate(of: torch.dtype, side: int) -> float:
        a, b = (torch.randn(side, side).to(of) for _ in range(2))
        return 2 * side**3 / best(lambda: a @ b)

    return rate(max(dtype, torch.float32, key=lambda each: rate(each, _SMALL_SIDE)), _SIDE)


def best(work: Callable[[], Any]) -> float:
    """The least seconds of several calls, after one that warms up."""
    took = []
    for _ in range(_CEILING_REPEATS + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def step_times(
    shape: str, dtype: torch.dtype, threads: int, int8: bool = False
) -> tuple[dict[str, float], Ceiling]:
    """Milliseconds of each kind of step, and the ceiling of plain steps.

    Args:
        int8: Whether our engine's weights are int8, which the ceiling reads and multiplies twice as
            fast as bfloat16.
    """
    kind, config = SHAPES[shape]
    model = kind(config).to(dtype).eval()
    top = ceiling(model, dtype, threads)
    if int8:
        read, rate = bandwidth(top.weights), 2 * matrix_rate(torch.bfloat16)
        top = replace(top, weight_bytes=top.weights, bandwidth=read, rate=rate)
    found = {
        f"ceiling, b={ROWS}": 1000 * top.step_seconds,
        f"transformers, b={ROWS}, context {CONTEXT}": transformers_step(model),
    }
    model = model.float() if int8 else model
    target = Target(model, EngineConfig(rows=ROWS, max_model_len=512), int8=int8)
    for c in measure(target, shape, 60.0).costs:
        if c.rows in (1, ROWS):
            found[f"ours, b={c.rows}, {c.tokens} tokens, context {c.context}"] = 1000 * c.seconds
    return found, top


@torch.inference_mode()
def transformers_step(model: Any) -> float:
    """Milliseconds of one token for each row after CONTEXT others."""
    ids = torch.ones((ROWS, CONTEXT), dtype=torch.long)
    took = []
    for _ in range(_STEP_REPEATS + 1):
        cache = DynamicCache()
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        began = time.perf_counter()
        model(input_ids=ids[:, :1], past_key_values=cache)
        took.append(time.perf_counter() - began)
    return 1000 * median(took[1:])
