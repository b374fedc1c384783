"""Names, types and shapes of the tensors in a safetensors file, read from its header alone."""

import json
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
