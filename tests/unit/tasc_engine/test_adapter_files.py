"""Adapter folders: what peft saves is read as peft means it; what is not served is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import make_adapter
from safetensors.torch import load_file, save_file

from tasc_engine.adapter_files import read_adapter
from tasc_engine.errors import UnsupportedModel
from tiny import make_folder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UP = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return make_adapter(base, tmp_path / "adapter", r=4, target_modules=["up_proj"])


def set_config(folder: Path, **values: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **values}))


def set_weights(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put weights in, or take them out, by the end of their names behind ``UP``."""
    found = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        key = f"{UP}.{name.replace('__', '.')}"
        found.pop(key, None)
        if tensor is not None:
            found[key] = tensor
    save_file(found, folder / WEIGHTS)


@pytest.mark.parametrize("rslora", [False, True])
def test_weights_and_scales_are_those_that_peft_merges(
    base: Path, tmp_path: Path, rslora: bool
) -> None:
    """Patterns are ends of names, or expressions; ranks and alphas have patterns of their own."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = make_adapter(
        base, tmp_path, r=4, lora_alpha=6, target_modules=["q_proj", "up_proj", "down_proj"],
        rank_pattern={"q_proj": 9, r"layers\.1\.mlp\..*_proj": 3}, use_rslora=rslora,
        alpha_pattern={"model.layers.0.mlp.up_proj": 7, "down_proj": 5},
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64) for _ in range(2)]
    merged = PeftModel.from_pretrained(models[1], str(path)).merge_and_unload()
    found = read_adapter("a", path).layers
    assert len(found) == 6
    for name, weights in found.items():
        added = merged.get_submodule(name).weight - models[0].get_submodule(name).weight
        own = weights.scale * weights.up.double() @ weights.down.double()
        torch.testing.assert_close(own, added, atol=1e-14, rtol=1e-12)


# What a setting is, and what is said of it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "no kind": ({"peft_type": None}, "peft_type is None"),
    "dora": ({"use_dora": True}, "use_dora is True"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "bias of B": ({"lora_bias": True}, "lora_bias is True"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "new tokens": ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\]"),
    "parameters": ({"target_parameters": ["w"]}, "target_parameters is"),
    "layers twice": ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication is"),
    "from some token on": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is"),
    "something new": ({"use_something_new": {"a": 1}}, "use_something_new is"),
    "another base": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "lying weights": ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
    "rank zero": ({"r": 0}, r"up_proj has weights .* and rank 0; .* above 0"),
    "another rank": ({"r": 8}, r"up_proj has weights .*\[4, 32\].* and rank 8"),
    "no alpha": ({"lora_alpha": None}, "NoneType"),
    "rank of another type": ({"r": [4]}, "list"),
    "pattern of another type": ({"rank_pattern": [4]}, "items"),
    "bad expression": ({"rank_pattern": {"(": 4}}, "parenthes|unterminated"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_is_not_served_is_refused_by_name(folder: Path, case: str) -> None:
    settings, said = REFUSED[case]
    read_adapter("mine", folder)
    set_config(folder, **settings)
    with pytest.raises(UnsupportedModel, match=f"adapter mine in {folder}: .*({said})"):
        read_adapter("mine", folder)


def emptied(folder: Path) -> None:
    save_file({}, folder / WEIGHTS)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def rank_zero(folder: Path) -> None:
    set_config(folder, r=0)
    weights = {"lora_A__weight": torch.ones(0, 32), "lora_B__weight": torch.ones(64, 0)}
    set_weights(folder, **weights)


def rewrite(name: str, content: bytes) -> Callable[[Path], None]:
    def broken(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return broken


def weights(**tensors: torch.Tensor | None) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        set_weights(folder, **tensors)

    return changed


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickled": (pickled, "no adapter_model.safetensors .only adapter_model.bin, .*run code.; save"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no adapter_model.safetensors .none.; save"),
    "no settings": (lambda f: (f / CONFIG).unlink(), "adapter_config.json"),
    "empty": (emptied, "it has no weights; save"),
    "cut off": (rewrite(WEIGHTS, b"\x10\0\0\0\0\0\0\0{}"), "adapter mine in .*[Hh]eader"),
    "no JSON": (rewrite(CONFIG, b"{"), "adapter mine in .*Expecting"),
    "no object": (rewrite(CONFIG, b"[]"), "holds no JSON object; save"),
    "deep": (rewrite(CONFIG, b"[" * 100_000), "adapter mine in .*recursion"),
    "rank of zero": (rank_zero, r"up_proj has weights .*\[0, 32\].*\[64, 0\].* rank 0"),
    "only A": (weights(lora_B__weight=None), r"up_proj has weights {'A': \[4, 32\]}"),
    "flat A": (weights(lora_A__weight=torch.ones(4)), r"{'A': \[4\], 'B': \[64, 4\]}"),
    "three dimensions": (weights(lora_A__weight=torch.ones(4, 1, 32)), r"'A': \[4, 1, 32\]"),
    "ranks differ": (weights(lora_A__weight=torch.ones(5, 32)), r"'A': \[5, 32\], 'B': \[64, 4\]"),
    "magnitudes": (weights(lora_magnitude_vector=torch.ones(64)), "weights .*magnitude_vector;"),
    "embeddings": (weights(lora_embedding_A=torch.ones(4, 9)), "weights .*lora_embedding_A;"),
    "bias": (weights(lora_B__bias=torch.ones(64)), r"weights .*lora_B\.bias; only"),
    "whole layer": (weights(weight=torch.ones(64, 32)), r"weights .*up_proj\.weight; only"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_broken_or_has_other_weights_is_refused(folder: Path, case: str) -> None:
    breaks, said = BROKEN[case]
    breaks(folder)
    with pytest.raises(UnsupportedModel, match=said):
        read_adapter("mine", folder)


def test_how_an_adapter_was_trained_is_no_matter(folder: Path) -> None:
    before = read_adapter("mine", folder)
    set_config(
        folder, lora_dropout=0.1, task_type=None, target_modules="all-linear", revision="main",
        peft_version="9.9", init_lora_weights="gaussian", base_model_name_or_path="elsewhere",
    )  # fmt: skip
    after = read_adapter("mine", folder)
    assert before.layers.keys() == after.layers.keys()
    assert [w.scale for w in before.layers.values()] == [w.scale for w in after.layers.values()]
