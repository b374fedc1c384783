"""Checks of a model folder by its files, before it is loaded, without torch and transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasc_engine.errors import UnsupportedModel

ADAPTER_CONFIG = "adapter_config.json"
# Layers that keep keys and values alone. Others keep a state that each token overwrites.
_ATTENTION = ("attention", "sliding", "full", "chunked")
_STATE_FIELDS = ("mamba_", "ssm_", "conv_L_cache", "linear_conv_kernel_dim", "lru_width", "xlstm_")
_STATE_FAMILIES = ("mamba", "rwkv", "xlstm", "recurrent_gemma")


def require_model_alone(folder: Path) -> None:
    """Refuse a model folder that holds an adapter beside the weights.

    transformers would add the adapter to the weights, also if they have it already.

    Raises:
        UnsupportedModel: It holds one.
    """
    if (folder / ADAPTER_CONFIG).is_file() and any(folder.glob("model*.safetensors")):
        raise UnsupportedModel(
            f"{folder} has {ADAPTER_CONFIG} beside the model's weights, and transformers would add "
            "that adapter to them; if it is merged into them already, delete adapter_config.json "
            "and adapter_model.*; else move both files to a folder of their own and name it as the "
            "adapter"
        )


def recurrent_state(config: Mapping[str, Any]) -> str | None:
    """Returns the setting by which layers keep a recurrent or convolutional state; None if none do.

    Each token overwrites such a state, so that rejected drafts cannot be taken back.

    Args:
        config: The content of ``config.json``, its text part over the rest.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:  # hybrid families also have models of attention alone
        kept = next((kind for kind in map(str, kinds) if not _attends(kind)), None)
        return kept and f"layers of the type {kept}"
    for name in config:
        if name.startswith(_STATE_FIELDS):
            return f"the setting {name}"
    family = str(config.get("model_type", ""))
    return f"the family {family}" if any(name in family for name in _STATE_FAMILIES) else None


def _attends(kind: str) -> bool:
    return "linear" not in kind and any(name in kind for name in _ATTENTION)


def in_words(state: str) -> str:
    """The refusal of a model with such a state."""
    return (
        f"{state}: the model keeps a recurrent or convolutional state, which each token overwrites "
        "and which cannot be rolled back behind rejected drafts here; name a model whose layers "
        "all attend to keys and values"
    )
