"""Reads LoRA adapters that peft saved: settings and weights of a folder, without peft.

Only safetensors are read, since a pickled file may run code. An adapter may only add
``x @ A.T @ B.T * scale`` to the outputs of linear layers. Other adapters are refused with a message
that names the unsupported part. The base model is not needed.
"""

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
from tasc_engine.lora.adapter_folder import (
    ALONE,
    CONFIG,
    require_low_rank,
    safe_weights,
    settings_of,
)
from tasc_engine.lora.low_rank import LowRank

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_ODD = (ValueError, TypeError, AttributeError)  # settings may be of any type


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter (Hu et al. 2021, arXiv 2106.09685).

    Attributes:
        layers: The adapter's weights, by the names of linear layers in the base model.
    """

    name: str
    layers: Mapping[str, LowRank]


def read_adapter(name: str, folder: Path) -> Adapter:
    """Read an adapter from a folder.

    Args:
        name: Name of the adapter, also in messages.

    Raises:
        UnsupportedModel: The folder has no LoRA adapter in safetensors, or the adapter has
            unsupported parts.
    """
    path = safe_weights(folder)
    try:
        settings = settings_of(folder)
        require_low_rank(settings)
        return Adapter(name, _layers(load_file(path), settings))
    except (OSError, SafetensorError, RecursionError, re.error, *_ODD) as error:
        raise UnsupportedModel(f"adapter {name} in {folder}: {error}") from error


def _layers(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, LowRank]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not (match := _NAME.fullmatch(key)):
            raise ValueError(
                f"it has weights {key}; one of several adapters may have only lora_A and lora_B of "
                f"linear layers: {ALONE}"
            )
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
            "rank], with a rank above 0"
        )
    if not all(bool(tensor.isfinite().all()) for tensor in pair.values()):
        raise ValueError(f"{module} has weights that are not finite; train the adapter again")
    alpha = float(_setting(settings, "alpha_pattern", "lora_alpha", module))
    root = settings.get("use_rslora")  # Kalajdzievski 2023, arXiv 2312.03732
    return LowRank(pair["A"], pair["B"], alpha / (math.sqrt(rank) if root else rank))


def _setting(settings: Mapping[str, Any], pattern: str, name: str, module: str) -> Any:
    """A module's own value if a pattern matches the end of its name, otherwise the default."""
    for key, own in (settings.get(pattern) or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return own
    if name not in settings:
        raise ValueError(f"{CONFIG} has no {name}; save the adapter again")
    return settings[name]
