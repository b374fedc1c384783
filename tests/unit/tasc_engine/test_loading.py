"""Tests the loading of model folders: files, quantisation, supported and refused models."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import ROWS, SPACE, logits_of, of_rows, relative
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BambaConfig,
    BloomConfig,
    FalconMambaConfig,
    GPT2Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2MoeConfig,
    T5Config,
)
from tree_layouts import Eager

from lora_folders import make_adapter
from support import SMALL, failing_where, refused
from tasc_engine.config import EngineConfig
from tasc_engine.errors import OutOfMemory, UnsupportedModel
from tasc_engine.layout import plain_batch
from tasc_engine.model import loading
from tasc_engine.model import target as target_module
from tasc_engine.model.cuda_graphs import GraphedForward, Limits
from tasc_engine.model.folder import recurrent_state, weight_files
from tasc_engine.model.linears import is_quantised, product_of
from tasc_engine.model.loading import ModelSource, load_model
from tasc_engine.model.target import Target, without_graphs
from tasc_jobs.demo.tasks import HERE, MODEL, TASKS
from tiny import SHAPE, make_folder, plain

CONFIG = EngineConfig(rows=len(ROWS), max_model_len=SPACE)
ADAPTERS = tuple((task, HERE / "adapters" / task) for task in TASKS)


class Trap:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("something pickled was loaded",)


def load(**source: Any) -> Target:
    return Target.load(ModelSource(MODEL, adapters=ADAPTERS, **source), CONFIG)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a model, which a test may change."""
    return make_folder(tmp_path / "base")


def test_model_without_safetensors_is_refused_and_not_unpickled(folder: Path) -> None:
    torch.save(Trap(), folder / "pytorch_model.bin")
    assert load_model(ModelSource(folder)) is not None  # it is ignored beside safetensors
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel):
        load_model(ModelSource(folder))


@pytest.mark.parametrize("merged", [True, False])
def test_adapter_without_safetensors_is_refused_and_not_unpickled(folder, merged, monkeypatch):
    adapter = make_adapter(folder, folder / "adapter", r=4, target_modules=["up_proj"])
    torch.save(Trap(), adapter / "adapter_model.bin")
    how: dict[str, Any] = {"adapter": adapter} if merged else {"adapters": (("a", adapter),)}
    Target.load(ModelSource(folder, **how), CONFIG)
    (adapter / "adapter_model.safetensors").unlink()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # no model is read in vain
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder, **how), CONFIG)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"more_tokens": 2}, "[322, 32]"),
        ({"more_tokens": 2, "modules_to_save": ["embed_tokens", "lm_head"]}, "[322, 32]"),
        ({"more_tokens": 2, "trainable_token_indices": [320, 321]}, "322"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_modules": ["up_proj"], "modules_to_save": ["q_proj"]}, "quantization"),
    ],
)
def test_error_of_an_unloadable_adapter_names_the_reason(folder, monkeypatch, config, named):
    adapter = make_adapter(folder, folder / "adapter", **config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # no model is read in vain
    with refused(UnsupportedModel, str(adapter), named):
        quantised = {"quantization": "int8"} if named == "quantization" else {}
        load_model(ModelSource(folder, adapter, **quantised))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [5, 6]},
        {"target_modules": ["embed_tokens", "up_proj"]},
        {"target_modules": ["lm_head", "up_proj"]},
    ],
)
@torch.inference_mode()
def test_embedding_adapter_equals_peft(tmp_path, config, tied) -> None:
    """Merged LoRA of a head that shares its weights would change the embeddings, too."""
    base = make_folder(tmp_path / "base", dtype=torch.float32, tied=tied)
    adapter = make_adapter(base, tmp_path / "adapter", **config)
    tensors = load_file(adapter / "adapter_model.safetensors")
    whole = {name: t + 0.1 * t.roll(1) for name, t in tensors.items() if "lora_" not in name}
    save_file(tensors | whole, adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(1, 20)[None]
    apart = model(ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about embeddings
        expected = PeftModel.from_pretrained(model, str(adapter)).eval()(ids).logits
    assert relative(apart, expected) > 0.01
    assert relative(load_model(ModelSource(base, adapter))(ids).logits, expected) < 1e-5


def test_adapter_with_unknown_weights_is_refused(folder: Path) -> None:
    """An example is the head of a classifier, which peft leaves out."""
    adapter = make_adapter(folder, folder / "adapter", target_modules=["up_proj"])
    load_model(ModelSource(folder, adapter))
    path = adapter / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.score.weight": torch.ones(2, 32)}, path)
    with refused(UnsupportedModel, str(adapter), "score.weight"):
        load_model(ModelSource(folder, adapter))


def test_contradicting_model_sources_are_refused() -> None:
    here = Path()
    for wrong in (
        {"adapter": here, "adapters": (("a", here),)},
        {"adapters": (("a", here), ("a", here))},
        {"quantization": "fp4"},
        {"quantization": "nf4", "dtype": "float64"},
    ):
        with refused(ValueError, *wrong):
            ModelSource(here, **wrong)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_all_linear_layers_except_the_lm_head_are_quantised(quantization: Any) -> None:
    model = load_model(ModelSource(MODEL, quantization=quantization))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {n for n, m in layers.items() if m.weight.element_size() > 1} == {"lm_head"}


by_dtype = pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow("compiles for seconds"))]
)


# Relative to the norm of the logits; a random model would be 1.4 off.
@by_dtype
@pytest.mark.parametrize(("quantization", "near"), [("nf4", 0.2), ("int8", 0.04)])
def test_quantised_models_are_close_to_the_original(quantization, near, dtype) -> None:
    found = logits_of(load(dtype=dtype, quantization=quantization), ROWS)
    error = relative(found, logits_of(load(dtype=dtype), ROWS))
    print(f"{quantization} in {dtype}: {error:.3f} of the norm of the logits")
    assert 0 < error < near


@by_dtype
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_row_does_not_depend_on_other_rows(quantization, dtype) -> None:
    """The logits are equal up to the rounding of a product of another shape."""
    target = load(dtype=dtype, quantization=quantization)
    together = logits_of(target, ROWS)
    for i in (0, 1, 2):
        alone = logits_of(target, ROWS[: i + 1])
        apart = relative(of_rows(alone, ROWS[: i + 1], [i]), of_rows(together, ROWS, [i]))
        assert apart < {"float32": 1e-5, "bfloat16": 0.02}[dtype]


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_adapter_of_a_quantised_model_equals_peft(quantization: Any) -> None:
    """The reference is peft; several adapters with our own products give the same."""
    source = ModelSource(MODEL, ADAPTERS[0][1], quantization=quantization)
    plain, own = ([(number, *part) for _, *part in ROWS] for number in (0, 1))
    target = load(quantization=quantization)
    found = logits_of(Target.load(source, CONFIG), plain)
    assert relative(found, logits_of(target, own)) < 0.005
    assert relative(found, logits_of(target, plain)) > 0.02


@by_dtype
@pytest.mark.parametrize("adapted", ["merged", "by row"])
@pytest.mark.parametrize(("quantization", "near"), [("nf4", 0.02), ("int8", 0.04)])
def test_quantised_lean_decoder_equals_the_code_of_the_model(
    quantization, near, adapted, dtype, monkeypatch
) -> None:
    """Tokens are equal; logits differ by the rounding of activations, which bfloat16 doubles."""
    how: dict[str, Any] = {"adapter": ADAPTERS[0][1]}
    rows = [(0, *part) for _, *part in ROWS]
    if adapted == "by row":
        how, rows = {"adapters": ADAPTERS}, [*ROWS]
    source = ModelSource(MODEL, quantization=quantization, dtype=dtype, **how)
    ours = Target.load(source, CONFIG)
    monkeypatch.setattr(target_module, "lean", lambda *_: None)
    theirs = Target.load(source, CONFIG)
    assert ours.decoder is not None
    assert theirs.decoder is None
    found, expected = logits_of(ours, rows), logits_of(theirs, rows)
    assert relative(found, expected) < near
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_lean_decoder_gives_the_tokens_of_transformers(quantization: Any) -> None:
    source = ModelSource(MODEL, quantization=quantization)
    target, model = Target.load(source, CONFIG), load_model(source)
    assert target.decoder is not None
    compared = 0
    for first in (40, 90, 200):
        prompt = np.arange(first, first + 12, dtype=np.int32)
        expected, found, new = plain(model, prompt.tolist(), 20), list[int](), prompt
        while len(found) < len(expected):  # transformers stops at the end of sequence
            read = 0 if new is prompt else len(prompt) + len(found) - 1
            found.append(int(target.next_tokens(plain_batch([0], read, new))[0]))
            new = np.array(found[-1:], np.int32)
        assert found == expected
        compared += len(expected)
    assert compared > 15


@torch.inference_mode()
def test_forward_of_quantised_layers_depends_on_shapes_only() -> None:
    """Tensors without values show a wait for the device, which a CUDA graph could not capture.

    The outlier threshold is the positive control: it reads values.
    """
    four = Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.float32)
    weight = Params4bit(torch.randn(32, 64), requires_grad=False, quant_type="nf4")
    four.weight, four.support_avx512bf16_for_cpu = weight, False  # GPUs have no such layout
    layers: list[Any] = [four.to("cpu").eval()]
    for threshold in (0.0, 6.0):
        eight = Linear8bitLt(64, 32, has_fp16_weights=False, threshold=threshold)
        eight.weight = Int8Params(torch.randn(32, 64), False, has_fp16_weights=False)
        layers.append(eight.to("cpu").eval())
    assert [is_quantised(layer) for layer in layers] == [True, True, False]
    x = torch.randn(3, 64)
    outputs = [layer(x) for layer in layers]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        unknown = mode.from_tensor(x)
        for layer, output in zip(layers[:2], outputs, strict=False):
            found = product_of(layer)(unknown)
            assert (found.shape, found.dtype) == (output.shape, output.dtype)
        with pytest.raises(DynamicOutputShapeException):
            layers[2](unknown)


def test_quantised_layer_that_cannot_be_captured_is_refused_with_the_way_out() -> None:
    class Broken(Eager):
        def record(self, run: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    for quantization, kind in (("int8", UnsupportedModel), (None, RuntimeError)):
        target = load(quantization=quantization)
        limits = Limits(rows=2, tokens=8, moves=4, scratch=target.cache.slots)
        logits = torch.empty((limits.tokens, target.vocab_size))
        target._graphs = GraphedForward(target.decoder, target.cache, limits, logits, Broken())
        with refused(kind, *(["int8", "bfloat16", "cpu"] if quantization else [])) as caught:
            target.warm_up()
        assert type(caught.value) is kind


@pytest.mark.parametrize("quantised", [True, False])
def test_warning_about_missing_graphs_names_reason_and_remedy(quantised: bool) -> None:
    assert "Triton" in without_graphs("LlamaForCausalLM", True, quantised)
    other = without_graphs("GemmaForCausalLM", False, quantised)
    assert all(name in other for name in ("GemmaForCausalLM", "CUDA graphs", "llama", "qwen3"))
    assert ("nf4" in other) == quantised


@pytest.mark.parametrize("threshold", [{}, {"llm_int8_threshold": 6.0}])
def test_int8_with_an_outlier_threshold_is_refused(tmp_path, threshold) -> None:
    path = make_folder(tmp_path, dtype=torch.float32) / "config.json"
    how = {"quant_method": "bitsandbytes", "load_in_8bit": True, **threshold}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": how}))
    with pytest.raises(UnsupportedModel):
        load_model(ModelSource(tmp_path))


def test_quantised_folder_keeps_its_own_settings(tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    made = load_model(ModelSource(MODEL, quantization="int8"))
    made.save_pretrained(folder)
    assert any(t.dtype == torch.int8 for t in load_file(folder / "model.safetensors").values())
    target = Target.load(ModelSource(folder), CONFIG)
    expected = Target(load_model(ModelSource(MODEL, quantization="int8")), CONFIG)
    plain = [(0, *part) for _, *part in ROWS]
    assert relative(logits_of(target, plain), logits_of(expected, plain)) < 1e-5
    with pytest.raises(UnsupportedModel):
        load_model(ModelSource(folder, quantization="nf4"))


@by_dtype
def test_loading_prints_nothing(dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    load(quantization="int8", dtype=dtype)
    Target.load(ModelSource(MODEL, ADAPTERS[0][1], quantization="nf4"), CONFIG)
    assert capfd.readouterr() == ("", "")


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
LFM2 = Lfm2Config(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, conv_L_cache=3,
    num_attention_heads=4, num_key_value_heads=2, block_multiple_of=8,
    layer_types=["conv", "full_attention", "conv"],
)  # fmt: skip
GRANITE = GraniteMoeHybridConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, shared_intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=0,
    mamba_n_heads=8, mamba_d_head=8, layer_types=["attention"] * 2,
)  # fmt: skip
STATES = {
    "convolutions": LFM2,
    "state spaces": MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=4),
}


@pytest.mark.parametrize("name", [*UNSUPPORTED, *STATES])
def test_model_that_cannot_be_batched_or_rolled_back_is_refused(tmp_path: Path, name: str) -> None:
    config = (UNSUPPORTED | STATES)[name]
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    with refused(UnsupportedModel, *(["state", "rolled back"] if name in STATES else [])):
        Target.load(ModelSource(tmp_path), SMALL)


@pytest.mark.parametrize(
    ("config", "keeps"),
    [
        (GRANITE, False),
        (GraniteMoeHybridConfig(layer_types=["attention", "mamba"], num_hidden_layers=2), True),
        (Lfm2Config(num_hidden_layers=2, layer_types=["full_attention"] * 2), False),
        (FalconMambaConfig(), True),
        (MambaConfig(), True),
        (BambaConfig(), True),
        (LlamaConfig(), False),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_recurrent_state_is_detected_by_layers_or_settings(config, keeps):
    assert bool(recurrent_state(config.to_dict())) == keeps


def test_attention_only_model_of_a_hybrid_family_is_loaded(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(GRANITE).save_pretrained(tmp_path)
    Target.load(ModelSource(tmp_path), SMALL)


def test_single_token_steps_detect_an_undeclared_state(tmp_path, monkeypatch) -> None:
    """The state is a convolution over three tokens, so a step with several tokens may hide it."""
    model = AutoModelForCausalLM.from_config(LFM2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(20 if "conv.conv" in name else 1)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "recurrent_state", lambda config: None)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(tmp_path), SMALL)


@pytest.mark.parametrize("broken", ["mask", "moved drafts", "wrong tokens stay"])
def test_wrong_mask_or_cache_is_detected_at_load(folder, monkeypatch, broken) -> None:
    """Positive control: masks, steps with drafts and the step after a rollback are checked."""
    honest = target_module.lay_out

    def wrong(batch):
        step = honest(batch)
        if broken == "mask":
            return replace(step, visible_lens=step.visible_lens + 1, trunks=step.trunks + 1)
        if broken == "moved drafts" and len(batch.drafts.tokens):
            return replace(step, positions=step.positions + (step.tree > 0))
        rollback = batch.context_lens[0] == 13 and not len(batch.drafts.tokens)
        return replace(step, slots=step.slots + 1) if rollback else step

    monkeypatch.setattr(target_module, "lay_out", wrong)
    with pytest.raises(UnsupportedModel):
        Target.load(ModelSource(folder), SMALL)


def test_window_that_only_the_mask_applies_limits_max_model_len(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = Qwen2MoeConfig(
        **{**SHAPE, "vocab_size": 300}, **window, **experts,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    Target.load(ModelSource(tmp_path), replace(SMALL, max_model_len=32))
    with refused(UnsupportedModel, "qwen2_moe", "32", "33"):
        Target.load(ModelSource(tmp_path), replace(SMALL, max_model_len=33))


def test_model_folder_with_an_adapter_beside_its_weights_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    """transformers would apply the adapter to weights that already contain it."""
    Target.load(ModelSource(folder), SMALL)
    make_adapter(folder, tmp_path / "lora")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "lora" / name, folder)
    with refused(UnsupportedModel, "adapter_config.json", "merged"):
        Target.load(ModelSource(folder), SMALL)


def test_distributed_checkpoint_shards_are_refused(folder: Path) -> None:
    """transformers prefers such shards to model.safetensors."""
    shard = "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(folder / "model.safetensors", folder / shard)
    with refused(UnsupportedModel, str(folder), shard):
        load_model(ModelSource(folder))


def test_weights_are_chosen_like_transformers(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "own.safetensors")
    with refused(UnsupportedModel, "own.safetensors"):
        load_model(ModelSource(folder))
    path = folder / "config.json"
    named = {"transformers_weights": "own.safetensors"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    save_file({"a": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    save_file({"b": torch.ones(1)}, folder / "model.fp16.safetensors", {"format": "pt"})
    assert [file.name for file in weight_files(folder)] == ["own.safetensors"]
    expected = load_file(folder / "own.safetensors")
    found = load_model(ModelSource(folder, dtype="float64")).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_learned_positions_are_supported(tmp_path: Path) -> None:
    config = GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(tmp_path)
    target = Target.load(ModelSource(tmp_path, dtype="float64"), SMALL)
    prompt = np.arange(1, 20, dtype=np.int32)
    (chosen,) = target.next_tokens(plain_batch([1], 0, prompt))
    assert [chosen] == plain(model, prompt.tolist(), 1)


def test_kv_cache_that_is_too_small_or_does_not_fit_memory_is_refused(folder, monkeypatch) -> None:
    with refused(ValueError, "kv_cache_bytes", "1000"):
        Target.load(ModelSource(folder), replace(SMALL, kv_cache_bytes=1000))
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    failing_where(
        monkeypatch, torch, "zeros", full, lambda n, shape, *_: len(np.atleast_1d(shape)) == 5
    )
    with pytest.raises(OutOfMemory):
        Target.load(ModelSource(folder), SMALL)
