"""Checks folders of LoRA adapters, as peft saves them, without importing torch or peft.

Only safetensors are read, since a pickled file may run code. The base model is not needed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasc_engine.errors import UnsupportedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
MERGE = (
    "merge it into a folder of its own (peft's merge_and_unload, then save_pretrained of model and "
    "tokenizer) and name that as the model"
)
# The remedy for an adapter that cannot be one of several.
ALONE = f"use it alone as the adapter of a task, or {MERGE}"

# Settings about how, or on which layers, an adapter was trained. None of them affects its results.
_NO_MATTER = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
))  # fmt: skip
_READ = frozenset((
    "bias", "fan_in_fan_out", "init_lora_weights", "r", "lora_alpha", "rank_pattern",
    "alpha_pattern", "use_rslora",
))  # fmt: skip
# Values of ``init_lora_weights`` that leave the base model's weights unchanged.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def safe_weights(folder: Path) -> Path:
    """The path of an adapter's weight file.

    Raises:
        UnsupportedModel: The folder has no weight file in safetensors.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        found = f"only {_PICKLED}, which may run code" if (folder / _PICKLED).is_file() else "none"
        raise UnsupportedModel(
            f"adapter in {folder}: it has no {WEIGHTS} ({found}); save it with peft's "
            "save_pretrained(folder, safe_serialization=True)"
        )
    return path


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings in an adapter's ``adapter_config.json``.

    Raises:
        ValueError: The file is missing or holds no JSON object, or the adapter is not LoRA.
        OSError: The file cannot be read.
    """
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        found = " and holds a whole model" if (folder / "config.json").is_file() else ""
        raise ValueError(f"{folder} has no {CONFIG}{found}; name a folder saved by peft") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch or save it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; save the adapter again")
    if (kind := content.get("peft_type")) != "LORA":
        raise ValueError(f"{CONFIG} has peft_type {kind!r}; only LORA is supported")
    return content


def require_low_rank(settings: Mapping[str, Any]) -> None:
    """Refuse settings that add more than a low-rank product, and unknown settings.

    Raises:
        ValueError: A setting is refused; the message names it.
    """
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"bias is {bias!r}; train the adapter with bias 'none', or {ALONE}")
    if (init := settings.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights is {init!r}, which changes the base model; convert the adapter to "
            f"plain LoRA, or {ALONE}"
        )
    for name, value in settings.items():
        if value and name not in _NO_MATTER | _READ:
            raise ValueError(
                f"{name} is {value!r}, which one of several adapters cannot have; {ALONE}"
            )
    if settings.get("fan_in_fan_out"):
        raise ValueError(f"fan_in_fan_out is true, so the layers are not nn.Linear; {ALONE}")
