"""Steps of models with random weights, in the shapes of SmolLM2-135M and Qwen2.5-0.5B.

No text is made: a step costs the same whatever it says. Ours and transformers step the same weights
in this process, one behind the other.
"""

import time
from statistics import median
from typing import Any

import torch
from engine_args import Asked
from engine_ceiling import Ceiling, ceiling
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tasc_engine import EngineConfig, Target
from tasc_engine.cost import measure

CONTEXT, ROWS = 64, 8
_REPEATS = 9
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


def step_times(asked: Asked) -> tuple[list[tuple[str, float]], Ceiling]:
    """Milliseconds of each kind of step, and the ceiling of plain ones."""
    assert asked.shape is not None, "only asked of a shape"
    dtype = getattr(torch, asked.dtype)
    kind, config = SHAPES[asked.shape]
    model = kind(config).to(dtype).eval()
    top = ceiling(model, dtype, asked.threads)
    theirs = transformers_step(model)
    target = Target(model, EngineConfig(rows=ROWS, max_model_len=512))
    costs = measure(target, asked.shape, 60.0).costs
    rows = [(f"ceiling, b={ROWS}", 1000 * top.step_seconds)]
    rows.append((f"transformers, b={ROWS}, context {CONTEXT}", theirs))
    rows += [
        (f"ours, b={c.rows}, {c.tokens} tokens, context {c.context}", 1000 * c.seconds)
        for c in costs
        if c.rows in (1, ROWS)
    ]
    return rows, top


@torch.inference_mode()
def transformers_step(model: Any) -> float:
    """Milliseconds of one token a row behind CONTEXT others."""
    ids = torch.ones((ROWS, CONTEXT), dtype=torch.long)
    took = []
    for _ in range(_REPEATS + 1):
        cache = DynamicCache()
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        began = time.perf_counter()
        model(input_ids=ids[:, :1], past_key_values=cache)
        took.append(time.perf_counter() - began)
    return 1000 * median(took[1:])
