"""The stage that times steps of the 0.5B shape on the device and compares them with the ceiling.

Weights are random, as the cost of a step does not depend on the text. The time of a step is that
from its feed on the host until its tokens are on the host, as in the engine.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, Qwen2Config

from benchmarks.engine.steps import CONTEXT, ROWS, SHAPES, Ceiling
from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.work import wait
from tasc_engine import EngineConfig, Target
from tasc_engine.layout import plain_batch
from tasc_engine.step.cost import StepCosts, measure

NAME, LENGTH, DRY = "0.5b", 512, {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
_REPEATS, _PROFILED, _KERNELS = 20, 20, 16


def steps(found: Found, here: Here) -> None:
    model = random_model(here)
    top = ceiling(model, here)
    found.put("weight_bytes", top.weight_bytes)
    found.put("bandwidth", top.bandwidth)
    found.put("matrix_rate", top.rate)
    found.put("ceiling_ms", 1000 * top.step_seconds)
    theirs = {str(rows): transformers_step(model, rows, here) for rows in (1, ROWS)}
    found.put("transformers_ms", theirs)
    target = Target(model, EngineConfig(rows=ROWS, max_model_len=LENGTH))
    found.put("graphs", captures(target))
    costs = measure(target, NAME, here(50, 2))
    found.put("costs", costs.as_json())
    plain = {str(rows): step_ms(costs, rows, 0) for rows in (1, ROWS)}
    found.put("plain_ms", plain)
    found.put("plain_tokens_per_second", {b: 1000 * int(b) / ms for b, ms in plain.items()})
    found.put("plain_over_ceiling", {b: 1000 * top.step_seconds / ms for b, ms in plain.items()})
    found.put("plain_over_transformers", {b: theirs[b] / ms for b, ms in plain.items()})
    found.put("drafted_ms", {
        str(rows): {str(n): step_ms(costs, rows, n) for n in (1, 2, 4, 8, 16, 32)}
        for rows in (1, ROWS)
    })  # fmt: skip
    for rows in (1, ROWS):
        found.put(f"where_time_goes_b{rows}", profiled(target, rows, here))


def random_model(here: Here) -> Any:
    kind, config = SHAPES[NAME]
    if here.dry:
        config = Qwen2Config(**DRY, tie_word_embeddings=True)
    with torch.device(here.device):
        torch.manual_seed(0)
        return kind(config).to(getattr(torch, here.dtype)).eval()


def ceiling(model: Any, here: Here) -> Ceiling:
    """The ceiling by the rate at which this device reads or copies as many bytes as the weights."""
    size = sum(p.numel() for p in model.parameters())
    dtype, device = getattr(torch, here.dtype), here.device
    source = torch.ones(size, dtype=dtype, device=device)
    target = torch.empty_like(source)
    lines = source[: size // 1024 * 1024].view(-1, 1024)
    one, bytes_read = torch.ones(1024, dtype=dtype, device=device), size * dtype.itemsize
    rates = (
        bytes_read / best(source.sum, device),
        bytes_read / best(lambda: lines @ one, device),
        2 * bytes_read / best(lambda: target.copy_(source), device),
    )
    side = here(8192, 128)
    a, b = (torch.randn((side, side), device=device).to(dtype) for _ in range(2))
    rate = 2 * side**3 / best(lambda: a @ b, device)
    return Ceiling(bytes_read, size, max(rates), rate, batch=ROWS)


def best(work: Callable[[], Any], device: str) -> float:
    """Seconds of one of ten calls that are submitted together; the least of several."""
    took = []
    for _ in range(_REPEATS):
        wait(device)
        began = time.perf_counter()
        for _ in range(10):
            work()
        wait(device)
        took.append((time.perf_counter() - began) / 10)
    return min(took[1:])


@torch.inference_mode()
def transformers_step(model: Any, rows: int, here: Here) -> float:
    """Milliseconds of one token for each row after CONTEXT others, eager, read on the host."""
    ids = torch.ones((rows, CONTEXT), dtype=torch.long, device=here.device)
    cache, took = DynamicCache(), []
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    for _ in range(_REPEATS + 2):
        began = time.perf_counter()
        model(input_ids=ids[:, :1], past_key_values=cache).logits[:, -1].argmax(-1).tolist()
        took.append(time.perf_counter() - began)
    return 1000 * median(took[2:])


def step_ms(costs: StepCosts, rows: int, drafted: int) -> float:
    """Milliseconds of a step with so many draft tokens for each row, interpolated."""
    tokens = np.array([rows * (1 + drafted)], np.float64)
    return 1000 * float(costs.seconds(rows, tokens, CONTEXT)[0])


def captures(target: Target) -> bool:
    """Whether steps are replayed from graphs."""
    return any(type(part).__name__ == "GraphedForward" for part in vars(target).values())


def profiled(target: Target, rows: int, here: Here) -> dict[str, Any]:
    """Microseconds of a plain step, of all its kernels, and of the longest ones."""
    kv_starts = [LENGTH * row for row in range(rows)]
    batch = plain_batch(kv_starts, CONTEXT, np.ones(1, np.int32))
    target.next_tokens(batch)
    began = time.perf_counter()
    for _ in range(_PROFILED):
        target.next_tokens(batch)
    whole = 1e6 * (time.perf_counter() - began) / _PROFILED
    kinds = [ProfilerActivity.CPU] if here.dry else [ProfilerActivity.CUDA]
    with profile(activities=kinds) as seen:
        for _ in range(_PROFILED):
            target.next_tokens(batch)
    events = [(e.key, _microseconds(e, here) / _PROFILED, e.count) for e in seen.key_averages()]
    events.sort(key=lambda event: -event[1])
    return {
        "step_us": round(whole, 1),
        "kernels_us": round(sum(us for _, us, _ in events), 1),
        "longest": [
            {"name": name[:90], "us": round(us, 1), "a_step": count / _PROFILED}
            for name, us, count in events[:_KERNELS]
        ],
    }


def _microseconds(event: Any, here: Here) -> float:
    return float(event.self_cpu_time_total if here.dry else event.self_device_time_total)
