"""The parts that time steps of random weights: shapes, contexts and adapters.

Weights are random, as the cost of a step does not depend on the text. The time of a step is that
from its feed on the host until its tokens are on the host.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.engine.steps import CONTEXT
from benchmarks.engine.steps import SHAPES as SMALL
from benchmarks.gpu.gpu import Found, Here
from benchmarks.gpu.work import TOY, ceiling, free, kernels
from tasc_engine import EngineConfig, Target
from tasc_engine.layout import ForwardBatch, chains, plain_batch
from tasc_engine.lora.adapter_files import Adapter
from tasc_engine.lora.low_rank import LowRank

LENGTH, RANK, _REPEATS = 512, 16, 200


def _qwen2(hidden: int, inner: int, layers: int, heads: int) -> tuple[Any, Any]:
    return Qwen2ForCausalLM, Qwen2Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


# The shapes of Qwen2.5-0.5B, 1.5B and 3B, and of Llama-3.1-8B.
SHAPES = {
    "0.5b": SMALL["0.5b"],
    "1.5b": _qwen2(1536, 8960, 28, 12),
    "3b": _qwen2(2048, 11008, 36, 16),
    "8b": (LlamaForCausalLM, LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
    )),
}  # fmt: skip


def random_model(shape: str, here: Here) -> Any:
    """A model of a shape with random weights, on the device."""
    kind, config = SHAPES[shape]
    if here.dry:
        config = type(config)(**TOY, tie_word_embeddings=config.tie_word_embeddings)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, here.dtype))  # so that float32 weights never exist
    try:
        with torch.device(here.device):
            torch.manual_seed(0)
            return kind(config).eval()
    finally:
        torch.set_default_dtype(usual)


def batch_of(target: Target, rows: int, drafts: int, context: int) -> ForwardBatch:
    """A step of ``rows`` current tokens, each with a chain of so many draft tokens."""
    ids = (np.arange(rows * drafts, dtype=np.int32) * 7 + 1) % np.int32(target.vocab_size)
    starts = [target.config.max_model_len * row for row in range(rows)]
    plain = plain_batch(starts, context, np.ones(1, np.int32))
    return replace(plain, drafts=chains(ids.reshape(rows, drafts)))


def step_ms(target: Target, batch: ForwardBatch, repeats: int) -> list[float]:
    """Milliseconds of repeated steps, after three that warm up."""
    took = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        target.next_tokens(batch)
        took.append(1000 * (time.perf_counter() - began))
    return took[3:]


def steps(found: Found, here: Here) -> None:
    """Steps of each shape, by rows and drafts."""
    for shape in SHAPES:
        free(here)
        model = random_model(shape, here)
        top = ceiling(model, here, 1)
        found.put(f"{shape} rates", {"bytes": top.weight_bytes, "bandwidth": top.bandwidth,
                                     "matrix_rate": top.rate})  # fmt: skip
        target = Target(model, EngineConfig(rows=8, max_model_len=LENGTH))
        target.warm_up()
        for rows in (1, 8):
            for drafts in (0, 8, 32):
                least = replace(top, batch=rows * (1 + drafts)).step_seconds
                batch = batch_of(target, rows, drafts, CONTEXT)
                took = step_ms(target, batch, here(_REPEATS, 3))
                found.figure(f"{shape} b={rows} + {drafts} drafts", took, "ms", 1000 * least)
            plain = batch_of(target, rows, 0, CONTEXT)
            parts = kernels(partial(step_ms, target, plain, here(20, 2)), here)
            found.figure(f"{shape} b={rows} busy", parts["busy"], "of the time")
            found.put(f"{shape} b={rows} kernels", parts["longest"])
        del model, target


def contexts(found: Found, here: Here) -> None:
    """Steps after long contexts, and the speed of reading a prompt as long."""
    for length in (here(8192, 512), here(32768, 1024)):
        free(here)
        model = random_model("0.5b", here)
        top, config = ceiling(model, here, 1), model.config
        each = 4 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
        kv_bytes = config.num_hidden_layers * each // 2 * model.dtype.itemsize  # of a token
        target = Target(model, EngineConfig(rows=8, max_model_len=length))
        target.warm_up()
        for chunk in (256, here(2048, 256)):
            ids, tokens = np.ones(chunk, np.int32), length - length % chunk
            began = time.perf_counter()
            for start in range(0, tokens, chunk):
                target.next_tokens(plain_batch([0], start, ids))
            found.figure(
                f"{length} tokens, prompt in chunks of {chunk}",
                tokens / (time.perf_counter() - began), "tokens/s", top.rate / (2 * top.weights),
            )  # fmt: skip
        for rows in (1, 8):
            for drafts in (0, 8):
                context = length - 64
                read = rows * context * kv_bytes / top.bandwidth
                took = step_ms(target, batch_of(target, rows, drafts, context), here(50, 2))
                name = f"{length} tokens, b={rows} + {drafts} drafts"
                found.figure(name, took, "ms", 1000 * (top.step_seconds + read))
        del model, target


def adapters(found: Found, here: Here) -> None:
    """Steps with adapters loaded, of rows without an adapter and of rows with one each."""
    for count in (0, 1, 8, 32):
        free(here)
        model = random_model("0.5b", here)
        top = ceiling(model, here, 8)
        loaded = [random_adapter(model, f"adapter {i}", i) for i in range(count)]
        each = sum(x.down.numel() + x.up.numel() for x in loaded[0].layers.values()) if count else 0
        target = Target(model, EngineConfig(rows=8, max_model_len=LENGTH), loaded)
        target.warm_up()
        for used in sorted({0, min(count, 1), min(count, 8)}):
            batch = batch_of(target, 8, 0, CONTEXT)
            own = 1 + np.arange(8, dtype=np.int32) % used if used else np.zeros(8, np.int32)
            batch = replace(batch, adapters=own) if count else batch
            read = used * each * model.dtype.itemsize / top.bandwidth
            took = step_ms(target, batch, here(_REPEATS, 3))
            found.figure(
                f"{count} loaded, b=8, rows use {used}", took, "ms",
                1000 * (top.step_seconds + read),
            )  # fmt: skip
        del model, target


def random_adapter(model: Any, name: str, seed: int) -> Adapter:
    """An adapter of rank 16 for all linear layers of a model but the LM head."""
    random, head = torch.Generator().manual_seed(seed), model.get_output_embeddings()
    layers = {
        path: LowRank(
            0.01 * torch.randn(RANK, layer.in_features, generator=random),
            0.01 * torch.randn(layer.out_features, RANK, generator=random),
            2.0,
        )
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head
    }
    return Adapter(name, layers)
