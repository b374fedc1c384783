"""What models are taken, and which are refused at load."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    GPT2Config,
    MistralConfig,
    T5Config,
)

from support import refused
from tasc_engine import EngineConfig, ModelSource, Target, UnsupportedModel
from tasc_engine.errors import OutOfMemory
from tasc_engine.layout import plain_feed
from tasc_engine.model import target as target_module
from tiny import make_folder, plain

CONFIG = EngineConfig(rows=2, max_model_len=64)
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
UNSUPPORTED = {
    "too few positions": GPT2Config(**{**GPT2, "n_positions": 63}),
    "rope that depends on the batch": MistralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, sliding_window=None, rope_parameters=ROPE,
    ),
    "encoder and decoder": T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    ),
    "attention of its own": BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4),
}  # fmt: skip


@pytest.mark.parametrize("why", UNSUPPORTED)
def test_what_cannot_be_decoded_in_a_batch_is_refused(tmp_path: Path, why: str) -> None:
    config = UNSUPPORTED[why]
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(tmp_path), CONFIG)


def test_learned_positions_work_too(tmp_path: Path) -> None:
    config = GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(tmp_path)
    target = Target.load(ModelSource(tmp_path, dtype="float64"), CONFIG)
    prompt = np.arange(1, 20, dtype=np.int32)
    (chosen,) = target.next_tokens(plain_feed([1], 0, prompt))
    assert [chosen] == plain(model, prompt.tolist(), 1)


def test_a_kv_cache_too_small_for_anything_names_the_least(tmp_path: Path) -> None:
    with refused(ValueError, "kv_cache_bytes", "1000"):
        Target.load(ModelSource(make_folder(tmp_path)), replace(CONFIG, kv_cache_bytes=1000))


def test_a_kv_cache_that_does_not_fit_memory_says_what_to_lower(tmp_path, monkeypatch) -> None:
    folder = make_folder(tmp_path)
    honest = torch.zeros

    def scarce(shape, *args, **kwargs):
        if isinstance(shape, tuple) and len(shape) == 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return honest(shape, *args, **kwargs)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(OutOfMemory):
        Target.load(ModelSource(folder), CONFIG)


def test_a_mask_that_lets_tokens_see_too_much_is_found_at_load(tmp_path: Path, monkeypatch) -> None:
    """Positive control of the check at load: with the mask broken the model must be refused."""
    folder = make_folder(tmp_path)
    honest = target_module.lay_out

    def sees_one_more(feed):
        step = honest(feed)
        return replace(step, seen=step.seen + 1, trunks=step.trunks + 1)

    monkeypatch.setattr(target_module, "lay_out", sees_one_more)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder), CONFIG)
