"""LoRA adapters as peft saves them: settings and weights of a folder, read without peft.

Only safetensors are read: a pickled file may run code. What would change the model in a way other
than ``x @ A.T @ B.T * scale`` beside linear layers is refused by name. It knows no base model.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tasc_engine.errors import UnsupportedModel
from tasc_engine.lora.low_rank import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")

# Settings that say how an adapter was trained, or where: none is of use for what it computes.
_NO_MATTER = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    ]
)
_READ = frozenset(
    [
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
    ]
)
_ODD = (ValueError, TypeError, AttributeError)  # settings may be of any type
# Others begin by changing the base model's weights.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter (Hu et al. 2021, arXiv 2106.09685).

    Attributes:
        layers: Its weights, by the names of linear layers in the base model.
    """

    name: str
    layers: Mapping[str, LowRank]


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read a folder.

    Args:
        name: What the adapter is called, here and in messages.

    Raises:
        UnsupportedModel: It is no LoRA adapter in safetensors, or has parts that are not served.
    """
    path = safe_weights(folder)
    try:
        settings = _settings(folder)
        _check(settings)
        return Adapter(name, _layers(load_file(path), settings))
    except (OSError, SafetensorError, RecursionError, re.error, *_ODD) as error:
        raise UnsupportedModel(f"adapter {name} in {folder}: {error}") from error


def safe_weights(folder: Path) -> Path:
    """An adapter's weight file.

    Raises:
        UnsupportedModel: There is none in safetensors.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        found = f"only {_PICKLED}, which may run code" if (folder / _PICKLED).is_file() else "none"
        raise UnsupportedModel(
            f"adapter in {folder}: it has no {WEIGHTS} ({found}); save it with peft's "
            "save_pretrained(folder, safe_serialization=True)"
        )
    return path


def _settings(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{CONFIG} holds no JSON object; save the adapter again")
    return content


def _check(settings: Mapping[str, Any]) -> None:
    """Refuse what adds more than a low-rank product; a setting nobody knows might."""
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {settings.get('peft_type')!r}; only LORA is served")
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"bias is {bias!r}; train it with bias 'none', or merge it")
    if (init := settings.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights is {init!r}, which changes the base model; convert the adapter to "
            "plain LoRA, or merge it"
        )
    for name, value in settings.items():
        if value and name not in _NO_MATTER | _READ:
            raise ValueError(f"{name} is {value!r}, which is not served; merge the adapter")
    if settings.get("fan_in_fan_out"):
        raise ValueError("fan_in_fan_out is true: its layers are not linear ones; merge it")


def _layers(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, LowRank]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not (match := _NAME.fullmatch(key)):
            raise ValueError(f"it has weights {key}; only lora_A and lora_B of linear layers count")
        found.setdefault(match["module"], {})[match["side"]] = tensor
    if not found:
        raise ValueError("it has no weights; save the adapter again")
    return {module: _layer(module, found[module], settings) for module in sorted(found)}


def _layer(module: str, pair: Mapping[str, Tensor], settings: Mapping[str, Any]) -> LowRank:
    shapes = {side: list(tensor.shape) for side, tensor in sorted(pair.items())}
    a, b = shapes.get("A", []), shapes.get("B", [])
    rank = int(_setting(settings, "rank_pattern", "r", module))
    if not (len(a) == len(b) == 2 and a[0] == b[1] == rank > 0):
        raise ValueError(
            f"{module} has weights {shapes} and rank {rank}; A must be [rank, in] and B [out, "
            "rank], of a rank above 0"
        )
    if not all(bool(tensor.isfinite().all()) for tensor in pair.values()):
        raise ValueError(f"{module} has weights that are no finite numbers; train it again")
    alpha = float(_setting(settings, "alpha_pattern", "lora_alpha", module))
    root = settings.get("use_rslora")  # Kalajdzievski 2023, arXiv 2312.03732
    return LowRank(pair["A"], pair["B"], alpha / (math.sqrt(rank) if root else rank))


def _setting(settings: Mapping[str, Any], pattern: str, name: str, module: str) -> Any:
    """A module's own value, where a pattern is its name or the end of it, or that of all."""
    for key, own in (settings.get(pattern) or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return own
    if name not in settings:
        raise ValueError(f"{CONFIG} has no {name}; save the adapter again")
    return settings[name]
