"""Whether a folder holds a LoRA adapter that fits a base model, by its settings and tensor headers.

Weights are not read: an adapter that passes may still be refused when it is loaded.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTH_BYTES = 8
_MOST_HEADER = 100_000_000  # bytes, as the format has it


@dataclass(frozen=True)
class TensorHeader:
    """A tensor's type, as the format names it (F32, BF16 ...), and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a file by name.

    Raises:
        ValueError: It is no safetensors file.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= size <= min(_MOST_HEADER, path.stat().st_size - _LENGTH_BYTES):
            raise _refused(path)
        text = file.read(size)
    try:
        content = json.loads(text)
        return {k: _header(v) for k, v in content.items() if k != "__metadata__"}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise _refused(path) from error


def _header(entry: Any) -> TensorHeader:
    return TensorHeader(str(entry["dtype"]), tuple(map(int, entry["shape"])))


def _refused(path: Path) -> ValueError:
    return ValueError(f"{path} is no safetensors file; fetch it again (git lfs pull?)")


_CONFIG, _WEIGHTS, _PICKLE = (
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
)  # fmt: skip
_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_FLOATS = ("F64", "F32", "F16", "BF16")  # others are packed: their shapes say nothing


def check_adapter(folder: Path, base: Path) -> None:
    """Whether a PEFT folder is LoRA in safetensors, of a rank, with shapes of the base model's.

    Shapes are compared where the base folder has weights of the same name.

    Raises:
        ValueError: It is not; the message names what differs.
        OSError: A file cannot be read.
    """
    config = _config(folder / _CONFIG)
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{folder / _CONFIG} says peft_type {kind!r}; only LORA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{folder / _CONFIG} says rank r {rank!r}; it must be above 0")
    pairs = _pairs(folder, None if config.get("rank_pattern") else rank)
    if config.get("fan_in_fan_out"):
        return  # the base model's weights lie the other way round
    _check_shapes(pairs, _float_shapes(base), str(config.get("base_model_name_or_path")))


def _config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} has no {_CONFIG}; name a folder saved by peft") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); save the adapter again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; save the adapter again")
    return content


def _pairs(folder: Path, rank: int | None) -> dict[str, dict[str, TensorHeader]]:
    """Both matrices of each module, by module and side; of the rank named, or of any."""
    path = folder / _WEIGHTS
    if not path.is_file():
        found = f", only {_PICKLE}, which can run code" if (folder / _PICKLE).is_file() else ""
        raise ValueError(f"{folder} has no {_WEIGHTS}{found}; save it with safe_serialization=True")
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name, header in read_headers(path).items():
        if found_ := _LORA.fullmatch(name):
            pairs.setdefault(found_["module"], {})[found_["side"]] = header
    if not pairs:
        raise ValueError(f"{path} holds no LoRA weights (lora_A, lora_B); save the adapter again")
    for module, pair in pairs.items():
        _check_pair(path, module, pair, rank)
    return pairs


def _check_pair(
    path: Path, module: str, pair: Mapping[str, TensorHeader], rank: int | None
) -> None:
    """A is ``[rank, in]``, B ``[out, rank]``."""
    shapes = {side: list(header.shape) for side, header in sorted(pair.items())}
    a, b = shapes.get("A", []), shapes.get("B", [])
    if not (len(a) == len(b) == 2 and a[0] == b[1] > 0 and rank in (None, a[0])):
        wanted = f"r {rank}" if rank else "one r"
        raise ValueError(
            f"{path} has {module} in shapes {shapes}; need A [r, in] and B [out, r] of {wanted}: "
            "save the adapter again"
        )


def _float_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(base.glob("*.safetensors")):
        found = read_headers(path)
        shapes |= {name: h.shape for name, h in found.items() if h.dtype in _FLOATS}
    return shapes


def _check_shapes(
    pairs: Mapping[str, Mapping[str, TensorHeader]],
    base: Mapping[str, tuple[int, ...]],
    trained_for: str,
) -> None:
    for module, pair in pairs.items():
        theirs = base.get(f"{module}.weight")
        ours = (pair["B"].shape[0], pair["A"].shape[1])
        if theirs is not None and len(theirs) == 2 and ours != theirs:
            raise ValueError(
                f"it adapts {module} of {list(ours)}, the model's has {list(theirs)}; it was "
                f"trained for {trained_for}: name that model, or another adapter"
            )
