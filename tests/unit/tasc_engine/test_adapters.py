"""Adapters are read as peft reads them; rows of several in one forward equal merged models."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import (
    ROWS,
    SPACE,
    batches,
    logits_of,
    merged_logits,
    relative,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from tree_layouts import Eager

from lora_folders import WEIGHTS, make_adapter
from paired import paired
from support import refused
from tasc_engine.config import EngineConfig
from tasc_engine.errors import UnsupportedModel
from tasc_engine.layout import lay_out
from tasc_engine.lora import adapters as adapters_module
from tasc_engine.lora.adapter_files import read_adapter
from tasc_engine.lora.adapters import AdaptedModule
from tasc_engine.lora.low_rank import MaskedTokens
from tasc_engine.model import target as target_module
from tasc_engine.model.cuda_graphs import GraphedForward, Limits
from tasc_engine.model.loading import ModelSource
from tasc_engine.model.target import Target
from tiny import make_folder

# Norm of the difference over that of the logits. The adapter's product is rounded separately
# instead of together with the weights; the measured values are 8e-16, 6e-7 and 0.012.
CLOSE = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 0.03}
CONFIG = EngineConfig(rows=len(ROWS), max_model_len=SPACE, prefill_chunk=16)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEOX = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
UP = "model.layers.0.mlp.up_proj"
SETTINGS = "adapter_config.json"
ARCHITECTURES = ("llama", "qwen2", "gpt_neox")
Folders = tuple[Path, tuple[Path, Path]]


def make_two(folder: Path, architecture: str, every: list[str], some: list[str]) -> Folders:
    """Makes an adapter of many ranks in all layers, and one of an odd rank in some layers."""
    base = make_folder(folder / "base", architecture)
    first = make_adapter(
        base, folder / "first", 1, r=4, lora_alpha=6, target_modules=every,
        rank_pattern={every[0]: 17, f"layers.1.*{every[-1]}": 2}, alpha_pattern={every[1]: 11},
    )  # fmt: skip
    second = make_adapter(
        base, folder / "second", 2, r=3, lora_alpha=5, target_modules=some, use_rslora=True,
        layers_to_transform=[0],
    )  # fmt: skip
    return base, (first, second)


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    @cache
    def of(architecture: str) -> Folders:
        folder, neox = tmp_path_factory.mktemp(architecture), architecture == "gpt_neox"
        every, some = (NEOX, NEOX[:2]) if neox else (ALL, ["k_proj", "up_proj"])
        return make_two(folder, architecture, every, some)

    return of


@pytest.fixture(params=ARCHITECTURES)
def folders(request: Any, folders_of: Callable[[str], Folders]) -> Folders:
    return folders_of(request.param)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter that changes one layer."""
    base = make_folder(tmp_path_factory.mktemp("base"))
    return base, make_adapter(
        base, base / "adapter", r=4, target_modules=["up_proj"], layers_to_transform=[0]
    )


def load(folders: Folders, dtype: str = "float64", **source: Any) -> Target:
    base, (first, second) = folders
    named = (("first", first), ("second", second))
    return Target.load(ModelSource(base, dtype=dtype, adapters=named, **source), CONFIG)


def sources(folders: Folders, dtype: str) -> list[ModelSource]:
    """The base, and each adapter merged."""
    return [ModelSource(folders[0], adapter, dtype) for adapter in (None, *folders[1])]


def through_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "lean", lambda *args: None)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "CompiledTokens", lambda adapters: MaskedTokens())


WAYS = {
    "as it is": (),
    "modules": (through_modules,),
    "torch": (by_torch,),
    "both": (through_modules, by_torch),
}


@pytest.mark.parametrize(("architecture", "way", "dtype"), paired(ARCHITECTURES, WAYS, by=CLOSE))
def test_logits_of_mixed_adapters_equal_merged_models(
    folders_of: Any, architecture: str, dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in WAYS[way]:
        change(monkeypatch)
    assert_merged_alike(load(folders_of(architecture), dtype), folders_of(architecture), dtype)


def assert_merged_alike(target: Target, folders: Folders, dtype: str) -> None:
    merged = [Target.load(source, CONFIG) for source in sources(folders, dtype)]
    assert relative(logits_of(target, ROWS), merged_logits(merged, ROWS)) < CLOSE[dtype]


def test_adapters_change_only_logits_of_rows_with_an_adapter(folders: Folders) -> None:
    """Positive control of the test above."""
    target = load(folders)
    plain = [(0, *part) for _, *part in ROWS]
    base = Target.load(ModelSource(folders[0], dtype="float64"), CONFIG)
    untouched = logits_of(target, plain)
    assert torch.equal(untouched, logits_of(base, plain))
    for number in (1, 2):
        rows = [(number, *part) for _, *part in ROWS]
        assert relative(logits_of(target, rows), untouched) > 0.01


@torch.inference_mode()
def test_padded_graph_step_applies_adapters(folders: Folders, monkeypatch) -> None:
    by_torch(monkeypatch)
    target, rows = load(folders), [(n, a + b - 1, 1, tree) for n, a, b, tree in ROWS]
    cache = target.cache
    expected = logits_of(target, rows)
    limits = Limits(rows=9, tokens=40, moves=4, scratch=cache.slots)
    logits = torch.empty((limits.tokens, target.vocab_size), dtype=target.dtype)

    def forward(ids: Tensor, indices: Tensor, cache: Any, out: Tensor) -> Tensor:
        return out.copy_(target.forward(ids, indices, cache))

    graphs = GraphedForward(forward, cache, limits, logits, Eager())
    step = lay_out(batches(rows)[1])
    graphs.warm_up(adapters=True)
    for _ in range(2):
        found = graphs.start_logits(step)
        assert found is not None
        assert relative(found(), expected) < CLOSE["float64"]


def test_adapter_numbers_are_found_by_name(folders: Folders) -> None:
    target = load(folders)
    assert target.adapters == ("first", "second")
    assert [target.adapter_number(name) for name in (None, "first", "second")] == [0, 1, 2]
    with refused(ValueError, "third", "second"):
        target.adapter_number("third")
    bare = Target.load(ModelSource(folders[0]), CONFIG)
    assert bare.adapters == ()
    with refused(ValueError, "first"):
        bare.adapter_number("first")


def test_adapter_of_unknown_layer_or_shape_is_refused(up, tmp_path, folder) -> None:
    other = make_folder(tmp_path / "other", "gpt_neox")
    with refused(UnsupportedModel, UP, "GPTNeoX"):
        Target.load(ModelSource(other, adapters=(("a", folder),)), CONFIG)
    tensors = load_file(folder / WEIGHTS)
    for new in ("lm_head", "model.embed_tokens", "model.layers.0.mlp", f"{UP[:-7]}down_proj"):
        renamed = {key.replace(UP, new): tensor for key, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, folder / WEIGHTS)
        with refused(UnsupportedModel, "adapter a", new):
            Target.load(ModelSource(up[0], adapters=(("a", folder),)), CONFIG)


def test_adapted_layer_refuses_inputs_with_only_some_of_the_tokens() -> None:
    """A layer of experts does not know the rows of its tokens."""
    layer = AdaptedModule(nn.Linear(4, 4), lambda x, y: None, lambda: 6, "experts.0")
    assert layer(torch.ones(1, 6, 4)).shape == (1, 6, 4)
    with pytest.raises(UnsupportedModel):
        layer(torch.ones(3, 4))


IN_FILE = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(up: Any, tmp_path: Path) -> Path:
    return shutil.copytree(up[1], tmp_path / "adapter")


def set_config(folder: Path, **values: Any) -> None:
    content = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps({**content, **values}))


def set_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put weights in, or take them out, by the part of their names after ``IN_FILE``."""
    found = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        key = f"{IN_FILE}.{name.replace('__', '.')}"
        found.pop(key, None)
        if tensor is not None:
            found[key] = tensor
    save_file(found, folder / WEIGHTS)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_weights_and_scales_equal_peft(up: Any, tmp_path, rslora: bool) -> None:
    """Patterns are ends of names, or expressions; ranks and alphas have patterns of their own."""
    base = up[0]
    path = make_adapter(
        base, tmp_path, r=4, lora_alpha=6, target_modules=["q_proj", "up_proj", "down_proj"],
        rank_pattern={"q_proj": 9, r"layers\.1\.mlp\..*_proj": 3}, use_rslora=rslora,
        alpha_pattern={"model.layers.0.mlp.up_proj": 7, "down_proj": 5},
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64) for _ in range(2)]
    merged = PeftModel.from_pretrained(models[1], str(path)).merge_and_unload()
    set_config(
        path, lora_dropout=0.1, task_type=None, revision="main", peft_version="9.9",
        init_lora_weights="gaussian", base_model_name_or_path="elsewhere",
    )  # fmt: skip
    found = read_adapter("a", path).layers  # its training settings do not matter
    assert len(found) == 6
    for name, weights in found.items():
        added = merged.get_submodule(name).weight - models[0].get_submodule(name).weight
        own = weights.scale * weights.up.double() @ weights.down.double()
        torch.testing.assert_close(own, added, atol=1e-14, rtol=1e-12)


UNSERVED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("IA3", None), "use_dora": (True,), "bias": ("lora_only",), "lora_bias": (True,),
    "modules_to_save": (["lm_head"],), "trainable_token_indices": ([3],),
    "target_parameters": (["w"],), "layer_replication": ([[0, 1], [0, 1]],),
    "alora_invocation_tokens": ([5],), "use_something_new": ({"a": 1},),
    "init_lora_weights": ("pissa",), "fan_in_fan_out": (True,),
}  # fmt: skip
ODD: dict[str, tuple[Any, ...]] = {
    "r": (0, 8, [4]), "lora_alpha": (None,), "rank_pattern": ([4], {"(": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*UNSERVED, *ODD])
def test_unsupported_adapter_setting_is_refused_and_named(folder: Path, name: str) -> None:
    read_adapter("mine", folder)
    for value in {**UNSERVED, **ODD}[name]:
        set_config(folder, **{name: value})
        with refused(UnsupportedModel, f"mine in {folder}", name if name in UNSERVED else ""):
            read_adapter("mine", folder)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def rank_zero(folder: Path) -> None:
    set_config(folder, r=0)
    set_weights(folder, lora_A__weight=torch.ones(0, 32), lora_B__weight=torch.ones(64, 0))


def rewrite(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def weights(**tensors: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: set_weights(folder, **tensors)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickled": (pickled, "no adapter_model.safetensors .only adapter_model.bin, .*run code.; save"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no adapter_model.safetensors .none.; save"),
    "no settings": (lambda f: (f / SETTINGS).unlink(), "adapter_config.json"),
    "empty": (lambda f: save_file({}, f / WEIGHTS), "it has no weights; save"),
    "cut off": (rewrite(WEIGHTS, b"\x10\0\0\0\0\0\0\0{}"), "adapter mine in .*[Hh]eader"),
    "no JSON": (rewrite(SETTINGS, b"{"), "adapter mine in .*Expecting"),
    "no object": (rewrite(SETTINGS, b"[]"), "holds no JSON object; save"),
    "deep": (rewrite(SETTINGS, b"[" * 100_000), "adapter mine in .*recursion"),
    "rank of zero": (rank_zero, r"up_proj has weights .*\[0, 32\].*\[64, 0\].* rank 0"),
    "only A": (weights(lora_B__weight=None), r"up_proj has weights {'A': \[4, 32\]}"),
    "flat A": (weights(lora_A__weight=torch.ones(4)), r"{'A': \[4\], 'B': \[64, 4\]}"),
    "three dimensions": (weights(lora_A__weight=torch.ones(4, 1, 32)), r"'A': \[4, 1, 32\]"),
    "ranks differ": (weights(lora_A__weight=torch.ones(5, 32)), r"'A': \[5, 32\], 'B': \[64, 4\]"),
    "magnitudes": (weights(lora_magnitude_vector=torch.ones(64)), "weights .*magnitude_vector;"),
    "embeddings": (weights(lora_embedding_A=torch.ones(4, 9)), "weights .*lora_embedding_A;"),
    "bias": (weights(lora_B__bias=torch.ones(64)), r"weights .*lora_B\.bias; one"),
    "whole layer": (weights(weight=torch.ones(64, 32)), r"weights .*up_proj\.weight; one"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_adapter_folder_is_refused(folder: Path, case: str) -> None:
    breaks, message = BROKEN[case]
    breaks(folder)
    with pytest.raises(UnsupportedModel, match=message):
        read_adapter("mine", folder)
