"""Checks, from settings and weight-file headers only, whether a LoRA adapter fits a model.

Neither torch nor the weights themselves are needed. Weight names in files may differ from the names
in the loaded model, so only shapes of weights with equal names are compared. Loading finds the
other faults.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tasc_engine.errors import UnsupportedModel
from tasc_engine.lora.adapter_folder import (
    ALONE,
    CONFIG,
    MERGE,
    require_low_rank,
    safe_weights,
    settings_of,
)
from tasc_engine.model.folder import Shape, float_shapes, tensor_shapes, vocabulary_rows

_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Parts of weight names that stand for peft's wrappers around modules that it copies or changes.
_WRAPPERS = re.compile(r"\.(?:base_layer|original_module|modules_to_save|token_adapter)(?=\.)")
_TRAINED_ROWS = ".trainable_tokens_delta"
_EMBEDDINGS = ("embed_tokens", "embed_in", "embed_out", "wte", "lm_head")  # one row per token
_Pairs: TypeAlias = Mapping[str, Mapping[str, Shape]]


def require_fit(
    adapter: Path, base: Path, *, by_row: bool = False, quantized: bool = False
) -> None:
    """Check that an adapter is LoRA in safetensors and that its weights fit a base model.

    Args:
        adapter, base: Folders; the base folder need not have weights.
        by_row: Whether the adapter is one of several from which each row chooses one. Such an
            adapter may change only linear layers.
        quantized: Whether the base is quantised during loading, so that no adapter is merged.

    Raises:
        UnsupportedModel: The adapter does not fit. The message names weights, sizes and a remedy.
    """
    try:
        settings = settings_of(adapter)
        if by_row:
            require_low_rank(settings)
        others = _check_pairs(settings, tensor_shapes(safe_weights(adapter)), base, by_row)
        _check_others(settings, others, base, quantized)
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"adapter in {adapter}: {error}") from error


def _check_pairs(
    settings: Mapping[str, Any], shapes: Mapping[str, Shape], base: Path, by_row: bool
) -> dict[str, Shape]:
    """Check the matrices of linear layers; return the remaining weights."""
    rank = settings.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{CONFIG} has r {rank!r}, but the rank must be an integer above 0")
    pairs: dict[str, dict[str, Shape]] = {}
    others: dict[str, Shape] = {}
    for key, shape in shapes.items():
        name = key.removeprefix("base_model.model.")
        if found := _LORA.fullmatch(name):
            pairs.setdefault(found["module"], {})[found["side"]] = shape
        else:
            others[name] = shape
    if not pairs:
        raise ValueError("it has no LoRA weights (lora_A, lora_B); save the adapter again")
    if by_row and others:
        raise ValueError(
            f"it has weights {next(iter(others))}; one of several adapters may have only lora_A "
            f"and lora_B of linear layers: {ALONE}"
        )
    for module, pair in pairs.items():
        _check_pair(module, pair, None if settings.get("rank_pattern") else rank)
    if not settings.get("fan_in_fan_out"):  # else the base model's weights are transposed
        _check_layers(pairs, float_shapes(base), str(settings.get("base_model_name_or_path")))
    return others


def _check_pair(module: str, pair: Mapping[str, Shape], rank: int | None) -> None:
    """Check that A is ``[rank, in]`` and B ``[out, rank]``; ``rank`` None allows any rank."""
    shapes = {side: list(shape) for side, shape in sorted(pair.items())}
    a, b = shapes.get("A", []), shapes.get("B", [])
    if not (len(a) == len(b) == 2 and a[0] == b[1] > 0 and rank in (None, a[0])):
        wanted = f"r {rank}" if rank else "one r"
        raise ValueError(
            f"it has {module} with shapes {shapes}; A must be [r, in] and B [out, r] with "
            f"{wanted}: save the adapter again"
        )


def _check_layers(pairs: _Pairs, theirs: Mapping[str, Shape], trained_for: str) -> None:
    for module, pair in pairs.items():
        own, wanted = (pair["B"][0], pair["A"][1]), theirs.get(f"{module}.weight")
        if wanted is None or len(wanted) != 2 or own == wanted:
            continue
        if own[1] == wanted[1] and _is_embedding(module):
            raise ValueError(_more_tokens(module, own, wanted))
        raise ValueError(
            f"it adapts {module} with shape {list(own)}, but the model's layer has {list(wanted)}; "
            f"it was trained for {trained_for}: name that model, or another adapter"
        )


def _check_others(
    settings: Mapping[str, Any], others: Mapping[str, Shape], base: Path, quantized: bool
) -> None:
    """Check weights that replace the model's own weights or are added to them."""
    theirs, rows = float_shapes(base), vocabulary_rows(base)
    ids = trained_ids(settings)
    if rows is not None and ids and ids[-1] >= rows:
        raise ValueError(
            f"trainable_token_indices has {ids[-1]}, but the model has only {rows} embeddings: "
            f"tokens were added before the training; {_grown(ids[-1] + 1)}"
        )
    for wrapped, shape in others.items():
        name = _WRAPPERS.sub("", wrapped)
        module, _, _ = name.rpartition(".")
        if name.endswith(".lora_B.bias"):
            layer = module.removesuffix(".lora_B")
            if not quantized and f"{layer}.weight" in theirs and f"{layer}.bias" not in theirs:
                raise ValueError(
                    f"it adds a bias to {layer}, which has none, so the adapter cannot be merged; "
                    "train it with lora_bias False"
                )
        elif "lora_" not in name and not name.endswith(_TRAINED_ROWS):
            _check_whole(name, module, shape, theirs, rows)
            if quantized and len(shape) == 2 and not _is_embedding(module):
                raise ValueError(
                    f"it has weights {name} (modules_to_save), which cannot replace quantised "
                    f"weights; leave quantization out, or {MERGE}"
                )


def _check_whole(
    name: str, module: str, shape: Shape, theirs: Mapping[str, Shape], rows: int | None
) -> None:
    wanted = theirs.get(name)
    if wanted is None and rows is not None and _is_embedding(module):
        wanted = (rows, *shape[1:])  # for a head without weights of its own
    if wanted is None or shape == wanted:
        return
    if shape[1:] == wanted[1:] and _is_embedding(module):
        raise ValueError(_more_tokens(module, shape, wanted))
    raise ValueError(
        f"it has weights {name} with shape {list(shape)}, but the model's have {list(wanted)}; "
        "name the model that it was trained for"
    )


def _is_embedding(module: str) -> bool:
    return module.rpartition(".")[2] in _EMBEDDINGS


def _more_tokens(module: str, own: Shape, wanted: Shape) -> str:
    return (
        f"it has {module} with shape {list(own)}, but the model's has {list(wanted)}: the adapter "
        f"was trained with {own[0]} tokens; {_grown(own[0])}"
    )


def _grown(rows: int) -> str:
    return f"load the model, call resize_token_embeddings({rows}), load the adapter, {MERGE}"


def trained_ids(settings: Mapping[str, Any]) -> list[int]:
    """The ids of tokens whose embeddings an adapter trains individually, sorted."""
    given = settings.get("trainable_token_indices") or ()
    lists = given.values() if isinstance(given, dict) else (given,)
    return sorted({id_ for ids in lists for id_ in ids if isinstance(id_, int)})
