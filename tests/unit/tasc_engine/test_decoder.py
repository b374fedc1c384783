"""The lean decoder gives the logits of the Hugging Face model it was made from."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

import tiny
from neural_drafters import decoder_of
from paired import paired
from tasc_engine.kv.cache import RowCache, on_device
from tasc_engine.layout import lay_out, plain_batch
from tasc_engine.model.decoder import LeanDecoder, lean

FAMILIES = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)
TOKENS = 14
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05}
# The head's size is one for all: attention is compiled for each.
SHAPE: dict[str, Any] = {
    **tiny.SHAPE, "vocab_size": 97, "intermediate_size": 48, "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}  # fmt: skip


def make(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # nothing stays zero or one
            p.add_(torch.randn_like(p) * (0.3 if p.dim() == 1 or "norm" in name else 0.1))
    return model


def step(decoder: LeanDecoder, cache: RowCache, ids: Tensor, start: int, wanted: Tensor) -> Tensor:
    """Returns the logits of a row's next tokens, which begin after place 5 of the cache."""
    layout = lay_out(plain_batch([5], start, ids.numpy().astype(np.int32)))
    cache.begin(layout, on_device(layout, torch.device("cpu")))
    return decoder(ids, wanted, cache).clone()


@torch.inference_mode()
def same_logits(model: Any) -> None:
    """A prompt in two chunks: all places of the first, some of the second, out of order."""
    ids, cut, wanted = torch.arange(3, 3 + TOKENS) * 5 % 97, 9, torch.tensor([4, 0, 3])
    decoder, cache, places = decoder_of(model, 64), RowCache(3, 64), torch.arange(TOKENS)
    first = step(decoder, cache, ids[:cut], 0, places[:cut])
    second = step(decoder, cache, ids[cut:], cut, wanted)
    found = torch.cat((first, second))
    expected = model(ids[None], use_cache=False).logits[0]
    expected = torch.cat((expected[:cut], expected[cut:][wanted]))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    error = (found - expected).double().norm() / expected.double().norm()
    assert float(error) < CLOSE[model.dtype]


@pytest.mark.parametrize(
    ("family", "dtype", "kv_heads", "tied"),
    paired(FAMILIES, CLOSE, by=(1, 2, 4), and_by=(False, True)),
)
def test_lean_decoder_logits_equal_the_model(family, dtype, kv_heads, tied) -> None:
    shape = {**SHAPE, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    same_logits(make(family(**shape), dtype))


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "wide heads": LlamaConfig(**{**SHAPE, "num_attention_heads": 8}),
    "gelu": LlamaConfig(**SHAPE, hidden_act="gelu"),
    "linear rope": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama3 rope": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "llama3", **ROPE, **LLAMA3}),
    "yarn rope": LlamaConfig(**SHAPE, rope_parameters={"rope_type": "yarn", **ROPE}),
    "window": MistralConfig(**SHAPE, sliding_window=4),
    "no biases": Qwen3Config(**SHAPE, attention_bias=False),
    "qwen3 biases": Qwen3Config(**SHAPE, attention_bias=True),
    "some windows": Qwen2Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lean_decoder_follows_family_settings(variant: str) -> None:
    same_logits(make(VARIANTS[variant], torch.float64))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
UNKNOWN = {
    "gemma2": Gemma2Config(**SHAPE),
    "gpt_neox": GPTNeoXConfig(
        **{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}, tie_word_embeddings=False
    ),
    "phi": PhiConfig(**SHAPE),
    "dynamic rope": LlamaConfig(**SHAPE, rope_parameters=DYNAMIC),
    "partial rope": LlamaConfig(**SHAPE, rope_parameters=PARTIAL),
    "tensor parallel pretraining": LlamaConfig(**SHAPE, pretraining_tp=2),
    "capped logits": LlamaConfig(**SHAPE, final_logit_softcapping=30.0),
}


def test_lean_decoder_refuses_models_that_need_other_code() -> None:
    class Other(torch.nn.Linear):
        pass

    found = {name: AutoModelForCausalLM.from_config(UNKNOWN[name]).eval() for name in UNKNOWN}
    changed, mixed = (make(LlamaConfig(**SHAPE), torch.float32) for _ in range(2))
    changed.model.layers[1].mlp.up_proj = Other(32, 48, bias=False)
    mixed.model.norm.double()
    found |= {"projections of another kind": changed, "mixed dtypes": mixed}
    assert {name: lean(model, 64) for name, model in found.items()} == dict.fromkeys(found)


@torch.inference_mode()
def test_step_without_logits_still_writes_keys_and_values() -> None:
    decoder, cache = decoder_of(make(LlamaConfig(**SHAPE), torch.bfloat16), 64), RowCache(3, 64)
    none = torch.empty(0, dtype=torch.int64)
    assert step(decoder, cache, torch.arange(4), 0, none).shape == (0, 97)
    kept = cache.copied(0, 64).flatten(2).abs().amax(-1) > 0
    assert kept.nonzero()[:, 1].tolist() == [5, 6, 7, 8] * 3
