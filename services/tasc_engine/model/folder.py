"""Checks the files of a model folder before loading, without torch and transformers."""

import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError, safe_open

from tasc_engine.errors import UnsupportedModel
from tasc_text.formats import other_format

Shape: TypeAlias = tuple[int, ...]
ADAPTER_CONFIG, CONFIG = "adapter_config.json", "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Shards of a distributed checkpoint, which transformers prefers to all other files.
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# Quantisation methods and the packages that transformers needs for them. None of these packages is
# a dependency of this project.
_NEEDED = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels",),
    "fbgemm_fp8": ("fbgemm_gpu",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("flute",),
    "hqq": ("hqq",),
    "quanto": ("optimum",),
    "quark": ("quark",),
    "spqr": ("spqr_quant",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
# Files that older programs wrote beside a config.json that does not mention quantisation.
_FILES_OF_METHODS = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
# Types of models that `tasc_engine.model.decoder` runs.
OWN_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_FLOATS = ("F64", "F32", "F16", "BF16")  # tensors of other types are packed, with other shapes
# Words in the types of layers that keep only keys and values. Layers of other types keep a state
# that each token overwrites.
_ATTENTION = ("attention", "sliding", "full", "chunked")
_STATE_FIELDS = ("mamba_", "ssm_", "conv_L_cache", "linear_conv_kernel_dim", "lru_width", "xlstm_")
_STATE_FAMILIES = ("mamba", "rwkv", "xlstm", "recurrent_gemma")


def require_model(folder: Path) -> None:
    """Refuse a folder without a transformers model, or with one quantised for other programs.

    Raises:
        UnsupportedModel: The folder holds an adapter or a model in another format, or needs
            packages that are not installed.
    """
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        base = _object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise UnsupportedModel(
            f"{folder} holds an adapter without its model; name {base or 'the base model'} as the "
            "model, and this folder as the adapter"
        )
    if found := other_format(folder):
        raise UnsupportedModel(found)
    if not (folder / CONFIG).is_file() and "gguf" in str(folder).lower():  # a hub copy
        raise UnsupportedModel(
            f"{folder} has no {CONFIG}; GGUF files of llama.cpp are not read: name the model that "
            "they were made from"
        )
    if fault := quantization_fault(folder):
        raise UnsupportedModel(fault)


def quantization_fault(folder: Path) -> str | None:
    """Why quantised weights of a folder cannot be loaded, and a remedy; None if they can."""
    way_out = "name the unquantised model; to save memory, quantise it with --quantization"
    config = _object(folder / CONFIG)
    own = config.get("quantization_config") or config.get("quantization")
    if isinstance(own, dict) and "bits" in own and "quant_method" not in own:
        return f"{folder} is quantised by MLX, which transformers does not read; {way_out}"
    method = str(own.get("quant_method")) if isinstance(own, dict) else ""
    for name, file in _FILES_OF_METHODS.items():
        if not method and (folder / file).is_file():
            method = name
    absent = [
        name for name in _NEEDED.get(method.lower(), ()) if importlib.util.find_spec(name) is None
    ]
    if not absent:
        return None
    return f"{method.upper()} weights need missing packages ({', '.join(absent)}); {way_out}"


def int8_fault(config: Mapping[str, Any]) -> str | None:
    """Why a model cannot have int8-dynamic products, and a remedy; None if it can."""
    kind, gates = config.get("model_type"), config.get("hidden_act", "silu")
    if kind in OWN_TYPES and gates == "silu":
        return None
    return (
        f"int8-dynamic is asked for, and the model is {kind} with {gates} gates; it needs one "
        f"of {', '.join(OWN_TYPES)} with silu gates: use dtype bfloat16 or another quantization"
    )


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers reads the weights, without other copies of the weights."""
    return [path for path in _named_files(folder) if path.is_file()]


def _named_files(folder: Path) -> list[Path]:
    first = _first_file(folder)
    if not first.name.endswith(".json"):
        return [first]
    placed = _object(first).get("weight_map")
    names = set(map(str, placed.values())) if isinstance(placed, dict) else set()
    return [folder / name for name in sorted(names)]


def _first_file(folder: Path) -> Path:
    """The file that transformers reads first: weights, or an index of their files."""
    named = _object(folder / CONFIG).get("transformers_weights")
    name = WEIGHTS if (folder / WEIGHTS).is_file() else INDEX
    return folder / (named if isinstance(named, str) else name)


def require_weights(folder: Path) -> None:
    """Refuse a model folder without usable weights; see also `require_model_alone`.

    Raises:
        UnsupportedModel: The folder has no weights in safetensors, a weight file is missing, or
            other files would change the weights.
    """
    require_model_alone(folder)
    if not _first_file(folder).is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        has = f"; {found[0]} is a name that transformers does not read" if found else ""
        raise UnsupportedModel(
            f"{folder} has no weights in safetensors ({WEIGHTS} or {INDEX}){has}; if you trust its "
            "files, load the model once and save it with save_pretrained(folder)"
        )
    files = _named_files(folder)
    if lost := [path.name for path in files if not path.is_file()]:
        raise UnsupportedModel(
            f"{folder} lacks {lost[0]} ({len(lost)} of {len(files)} weight files are missing); "
            "fetch the model again"
        )


def require_model_alone(folder: Path) -> None:
    """Refuse a model folder with other files that would change the model's weights.

    transformers would add an adapter in the folder to the weights, even if the adapter has already
    been merged.

    Raises:
        UnsupportedModel: The folder holds an adapter, or shards of a distributed checkpoint.
    """
    if (folder / ADAPTER_CONFIG).is_file() and any(folder.glob("model*.safetensors")):
        raise UnsupportedModel(
            f"{folder} has {ADAPTER_CONFIG} beside the model's weights, and transformers would add "
            "that adapter to the weights; if the adapter is already merged, delete "
            "adapter_config.json and adapter_model.*; else move both files to a separate folder "
            "and name that folder as the adapter"
        )
    names = (path.name for path in folder.glob("shard-*.safetensors"))
    if shards := sorted(filter(_DISTRIBUTED.fullmatch, names)):
        raise UnsupportedModel(
            f"{folder} has {len(shards)} files of a distributed checkpoint, such as {shards[0]}, "
            f"which transformers prefers to {WEIGHTS}; load the checkpoint and save it with "
            "save_pretrained(folder), or delete these files"
        )


def tensor_shapes(path: Path, dtypes: Collection[str] = ()) -> dict[str, Shape]:
    """The shapes of a file's tensors by name, read from its header only.

    Args:
        dtypes: Types of the tensors to return; empty for all types.

    Raises:
        ValueError: The file is not in safetensors format, or is truncated.
        OSError: The file cannot be read.
    """
    try:
        with safe_open(path, "numpy") as file:
            found = {name: file.get_slice(name) for name in file.offset_keys()}
            return {
                name: tuple(tensor.get_shape())
                for name, tensor in found.items()
                if not dtypes or tensor.get_dtype() in dtypes
            }
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file; fetch it again (git lfs pull?)"
        ) from error


def float_shapes(folder: Path) -> dict[str, Shape]:
    """The shapes of a model's unpacked weights; raises the errors of `tensor_shapes`."""
    files = weight_files(folder)
    return {name: shape for path in files for name, shape in tensor_shapes(path, _FLOATS).items()}


def vocabulary_rows(folder: Path) -> int | None:
    """The number of embedding rows in a model's settings; None if the settings do not give it."""
    config = _object(folder / CONFIG)
    text = config.get("text_config")
    rows = {**config, **(text if isinstance(text, dict) else {})}.get("vocab_size")
    return rows if isinstance(rows, int) else None


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty object if none can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def recurrent_state(config: Mapping[str, Any]) -> str | None:
    """Returns the setting that gives layers a recurrent or convolutional state, or None.

    Each token overwrites such a state, so rejected drafts could not be undone.

    Args:
        config: The content of ``config.json``; for a multimodal model, the text model's settings.
    """
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:  # hybrid families also have models with attention only
        for kind in map(str, kinds):
            if "linear" in kind or not any(name in kind for name in _ATTENTION):
                return f"layers of the type {kind}"
        return None
    for name in config:
        if name.startswith(_STATE_FIELDS):
            return f"the setting {name}"
    family = str(config.get("model_type", ""))
    return f"the family {family}" if any(name in family for name in _STATE_FAMILIES) else None


def in_words(state: str) -> str:
    """The error message that refuses a model with such a state."""
    return (
        f"{state}: the model keeps a recurrent or convolutional state, which each token overwrites "
        "and which cannot be rolled back after rejected drafts; name a model whose layers all "
        "attend to keys and values"
    )
