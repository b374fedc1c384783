"""What models are taken, and which are refused at load."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    MistralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from support import refused
from tasc_engine import EngineConfig, ModelSource, Target, UnsupportedModel
from tasc_engine.errors import OutOfMemory
from tasc_engine.layout import plain_feed
from tasc_engine.model import target as target_module
from tiny import make_folder, make_tokenizer, plain

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
CONFIG = EngineConfig(rows=2, max_model_len=64)


def save(folder: Path, config) -> Path:
    make_tokenizer(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_positions_beyond_the_models_own_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder), EngineConfig(max_model_len=1024))


def test_rope_that_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = save(tmp_path, MistralConfig(**SHAPE, sliding_window=None, rope_parameters=rope))
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder), CONFIG)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(tmp_path), CONFIG)


def test_learned_positions_work_too(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    folder = save(tmp_path, config)
    target = Target.load(ModelSource(folder, dtype="float64"), CONFIG)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    prompt = torch.arange(1, 20, dtype=torch.int32).numpy()
    (chosen,) = target.next_tokens(plain_feed([1], 0, prompt))
    assert [chosen] == plain(model, prompt.tolist(), 1)


def test_an_adapter_is_merged(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = make_folder(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    source = ModelSource(folder, tmp_path / "adapter", dtype="float64")
    prompts = [list(range(k, k + 9)) for k in range(1, 60, 4)]

    def chosen(target: Target) -> list[int]:
        arrays = [torch.tensor(p, dtype=torch.int32).numpy() for p in prompts]
        return [int(target.next_tokens(plain_feed([0], 0, a))[0]) for a in arrays]

    with_adapter = chosen(Target.load(source, CONFIG))
    without = chosen(Target.load(ModelSource(folder, dtype="float64"), CONFIG))
    assert with_adapter == [plain(adapted, p, 1)[0] for p in prompts]
    assert with_adapter != without


def test_a_model_that_goes_round_the_attention_interface_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder), CONFIG)


def test_a_kv_cache_too_small_for_anything_names_the_least(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with refused(ValueError, "kv_cache_bytes", "1000"):
        Target.load(ModelSource(folder), dataclasses.replace(CONFIG, kv_cache_bytes=1000))


def test_a_kv_cache_that_does_not_fit_memory_says_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path)
    honest = torch.zeros

    def scarce(shape, *args, **kwargs):
        if isinstance(shape, tuple) and len(shape) == 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return honest(shape, *args, **kwargs)

    monkeypatch.setattr(torch, "zeros", scarce)
    with pytest.raises(OutOfMemory):
        Target.load(ModelSource(folder), CONFIG)


def test_a_mask_that_lets_tokens_see_too_much_is_found_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control of the check at load: with the mask broken the model must be refused."""
    folder = make_folder(tmp_path)
    honest = target_module.lay_out

    def sees_one_more(feed):
        step = honest(feed)
        return dataclasses.replace(step, seen=step.seen + 1, trunks=step.trunks + 1)

    monkeypatch.setattr(target_module, "lay_out", sees_one_more)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder), CONFIG)
