"""A corpus index as one file: a JSON header, then the flat arrays, opened by memory map.

Layout: 8 bytes magic, 8 bytes header length (little-endian), the header, padding to 64 bytes, then
each array at a 64-byte boundary. The header names format version, tokenizer fingerprint, settings,
array shapes and offsets, and the SHA-256 of the header's other fields and the arrays.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasc_draft.errors import IndexFileError
from tasc_draft.index import ARRAYS, CorpusIndex

MAGIC = b"TASCNGRM"
FORMAT = 1
_ALIGN = 64
_PREFIX = len(MAGIC) + 8
_FIELDS = ("fingerprint", "vocab_size", "n_max", "p_min")


def write_index(index: CorpusIndex, path: Path) -> None:
    """Write an index file; the name appears only when the file is whole."""
    body, layout = _body(index)
    header = {
        "format": FORMAT,
        **{field: getattr(index, field) for field in _FIELDS},
        "arrays": layout,
        "bytes": len(body),
    }
    header["sha256"] = _checksum(header, body)
    encoded = json.dumps(header, sort_keys=True).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        start = MAGIC + len(encoded).to_bytes(8, "little") + encoded
        file.write(start + bytes(-len(start) % _ALIGN))
        file.write(body)
    partial.replace(path)


def read_index(path: Path) -> CorpusIndex:
    """Map an index file read-only and verify it.

    Raises:
        IndexFileError: The file is truncated, foreign, of another format version or damaged.
    """
    header, begin = _read_header(path)
    size, promised = path.stat().st_size - begin, header.get("bytes")
    if size != promised:
        raise IndexFileError(
            f"{path} has {size} bytes of arrays, its header says {promised}; fetch it again"
        )
    body = np.memmap(path, np.uint8, "r", offset=begin)
    if _checksum(header, body.data) != header.get("sha256"):
        raise IndexFileError(f"{path} is damaged: its checksum does not match; fetch it again")
    fields: dict[str, Any] = {field: header[field] for field in _FIELDS}
    fields |= {name: _view(body, header["arrays"][name]) for name in ARRAYS}
    return CorpusIndex(**fields)


def _checksum(header: dict[str, Any], body: bytes | memoryview) -> str:
    fields = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    digest.update(body)
    return digest.hexdigest()


def _body(index: CorpusIndex) -> tuple[bytes, dict[str, Any]]:
    parts: list[bytes] = []
    layout: dict[str, Any] = {}
    offset = 0
    for name in ARRAYS:
        array: NDArray[np.int32] = np.ascontiguousarray(getattr(index, name), "<i4")
        raw = array.tobytes()
        raw += bytes(-len(raw) % _ALIGN)
        layout[name] = {"offset": offset, "length": len(array)}
        parts.append(raw)
        offset += len(raw)
    return b"".join(parts), layout


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        prefix = file.read(_PREFIX)
        if prefix[: len(MAGIC)] != MAGIC:
            raise IndexFileError(f"{path} is no draft index; `tasc build-index` makes one")
        length = int.from_bytes(prefix[len(MAGIC) :], "little")
        encoded = file.read(min(length, 1 << 20))
    try:
        header = json.loads(encoded)
        version = header["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise IndexFileError(f"{path} has a damaged header; fetch it again") from error
    if version != FORMAT:
        raise IndexFileError(
            f"{path} has format {version}, this program reads format {FORMAT}; "
            "build the index again with this version"
        )
    begin = _PREFIX + length
    return header, begin + -begin % _ALIGN


def _view(body: Any, place: dict[str, int]) -> NDArray[np.int32]:
    begin = place["offset"]
    return np.asarray(body[begin : begin + 4 * place["length"]]).view("<i4")
