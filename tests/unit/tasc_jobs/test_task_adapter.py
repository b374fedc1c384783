"""An adapter that cannot be served is refused by what its settings and weight headers say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support import refused
from tasc_jobs.tasks.model_folders import check_adapter

MODULE = "model.layers.0.self_attn.q_proj"  # 32 to 32 in tiny models
DOWN = "model.layers.1.mlp.down_proj"  # 64 to 32


def adapter(folder: Path, shapes: dict[str, tuple[int, int]] | None = None, **config: Any) -> Path:
    """An adapter of rank 4; shapes are ``(in, out)`` of each module."""
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "org/other", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    tensors = {}
    for module, (in_, out) in (shapes or {MODULE: (32, 32), DOWN: (64, 32)}).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, in_)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(out, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_what_peft_saves_passes(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).save_pretrained(tmp_path)
    check_adapter(tmp_path, folder)


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        ({"model.layers.0.named.otherwise": (7, 9), MODULE: (32, 32)}, {}),
        ({MODULE: (32, 48)}, {"fan_in_fan_out": True}),
        ({MODULE: (32, 32)}, {"r": 8, "rank_pattern": {"q_proj": 4}}),
    ],
)
def test_what_settings_and_headers_do_not_tell_passes(
    folder: Path, tmp_path: Path, shapes: dict[str, tuple[int, int]], config: dict[str, Any]
) -> None:
    check_adapter(adapter(tmp_path, shapes, **config), folder)


def test_a_base_without_weights_here_passes(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    check_adapter(adapter(tmp_path / "adapter", {MODULE: (7, 9)}), tmp_path / "base")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"r": 0}, "r 0"),
        ({"r": None}, "r None"),
        ({"r": 8}, "r 8"),
    ],
)
def test_settings_that_are_not_served_are_named(
    folder: Path, tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with refused(ValueError, named):
        check_adapter(adapter(tmp_path, **config), folder)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48)])
def test_an_adapter_of_another_model_is_told_by_its_shapes(
    folder: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    named = (MODULE, str(list(shape[::-1])), "[32, 32]", "org/other")
    with refused(ValueError, *named) as caught:
        check_adapter(adapter(tmp_path, {DOWN: (64, 32), MODULE: shape}), folder)
    assert DOWN not in str(caught.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def pickled(path: Path) -> None:
    path.rename(path.with_suffix(".bin"))


def not_lora(path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, path)


def half(path: Path) -> None:
    save_file({f"base_model.model.{MODULE}.lora_A.weight": torch.zeros(4, 32)}, path)


def ranks_differ(path: Path) -> None:
    name = f"base_model.model.{MODULE}.lora_"
    parts = {f"{name}A.weight": torch.zeros(4, 32), f"{name}B.weight": torch.zeros(32, 5)}
    save_file(parts, path)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (Path.unlink, "adapter_model.safetensors"),
        (pickled, "adapter_model.bin"),
        (cut, "adapter_model.safetensors"),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda p: p.write_bytes(b""), "adapter_model.safetensors"),
        (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "adapter_model.safetensors"),
        (not_lora, "lora_A"),
        (half, MODULE),
        (ranks_differ, MODULE),
    ],
)
def test_weights_that_cannot_be_read_safely_are_named(
    folder: Path, tmp_path: Path, spoil: Any, named: str
) -> None:
    spoilt = adapter(tmp_path)
    check_adapter(spoilt, folder)
    spoil(spoilt / "adapter_model.safetensors")
    with refused(ValueError, named):
        check_adapter(spoilt, folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [(None, "adapter_config.json"), ("{", "adapter_config.json"), ("[]", "adapter_config.json")],
)
def test_a_folder_that_peft_did_not_save_is_named(
    folder: Path, tmp_path: Path, text: str | None, named: str
) -> None:
    path = adapter(tmp_path) / "adapter_config.json"
    path.unlink() if text is None else path.write_text(text)
    with refused(ValueError, named):
        check_adapter(tmp_path, folder)
