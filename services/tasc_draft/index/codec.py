"""A draft index as one file: a JSON header, then flat arrays, opened by memory map.

Layout: 8 bytes magic, 8 bytes header length (little-endian), the header, padding to 64 bytes, then
each array at a 64-byte boundary. The header holds the format version, each part's numbers and
names, where each array lies, and the SHA-256 of all that and of the arrays. What a part means is
its own business.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tasc_draft.errors import IndexFileError, IndexFormatError
from tasc_draft.index.aligned import AlignedTable
from tasc_draft.index.bigrams import BigramTable
from tasc_draft.index.corpus import CorpusIndex
from tasc_draft.index.draft_index import DraftIndex
from tasc_draft.index.inputs import InputIndex
from tasc_draft.index.weights import Weights
from tasc_draft.settings import DraftSettings

MAGIC = b"TASCNGRM"
FORMAT = 3
_ALIGN = 64
_PREFIX = len(MAGIC) + 8
_MOST_HEADER = 1 << 20
_DTYPES = ("<i4", "<u4", "<f4", "|u1")
_PARTS: dict[str, Any] = {
    "corpus": CorpusIndex,
    "inputs": InputIndex,
    "aligned": AlignedTable,
    "bigrams": BigramTable,
    "weights": Weights,
    "settings": DraftSettings,
}


def write_index(index: DraftIndex, path: Path) -> None:
    """Write an index file; the name appears only when the file is whole."""
    parts, arrays = _taken_apart(index)
    layout, size = _layout(arrays)
    header = {"format": FORMAT, "parts": parts, "arrays": layout, "bytes": size}
    header["sha256"] = _checksum(header, arrays)
    encoded = json.dumps(header, sort_keys=True).encode()
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
        _pad(file)
        for array in arrays.values():
            file.write(array.data)
            _pad(file)
    partial.replace(path)


def read_index(path: Path) -> DraftIndex:
    """Map an index file read-only and verify its checksum.

    Whether its arrays make sense is `DraftIndex.check_integrity`'s business.

    Raises:
        IndexFileError: The file is truncated, foreign, of another format version or damaged.
    """
    header, begin = _read_header(path)
    size, promised = path.stat().st_size - begin, header.get("bytes")
    if size != promised:
        raise IndexFileError(
            f"{path} has {size} bytes of arrays, its header says {promised}; fetch it again"
        )
    body = np.memmap(path, np.uint8, "r", offset=begin) if size else np.zeros(0, np.uint8)
    try:
        arrays = {name: _view(body, place) for name, place in header["arrays"].items()}
        if _checksum(header, arrays) != header.get("sha256"):
            raise IndexFileError(f"{path} is damaged: its checksum does not match; fetch it again")
        return _put_together(header["parts"], arrays)
    except IndexFileError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IndexFileError(f"{path} has a damaged header; fetch it again") from error


def _taken_apart(index: DraftIndex) -> tuple[dict[str, Any], dict[str, Any]]:
    """The numbers and names of each part, and all arrays by ``part.field``."""
    parts: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    if index.word_starts is not None:
        arrays["word_starts"] = index.word_starts.view(np.uint8)
    if index.canonical is not None:
        arrays["canonical"] = index.canonical
    for name in _PARTS:
        part = getattr(index, name)
        if part is None:
            continue
        parts[name] = {}
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, np.ndarray):
                little = value.dtype.newbyteorder("<")
                arrays[f"{name}.{field.name}"] = np.ascontiguousarray(value, little)
            else:
                parts[name][field.name] = value
    # In the order in which a sorted header names them: the checksum takes them in it.
    return parts, dict(sorted(arrays.items()))


def _put_together(parts: dict[str, Any], arrays: dict[str, Any]) -> DraftIndex:
    starts = arrays.pop("word_starts", None)
    made: dict[str, Any] = {"word_starts": None if starts is None else starts.view(bool)}
    made["canonical"] = arrays.pop("canonical", None)
    for name, numbers in parts.items():
        own = {key.partition(".")[2]: a for key, a in arrays.items() if key.startswith(f"{name}.")}
        made[name] = _PARTS[name](**numbers, **own)
    return DraftIndex(**made)


def _layout(arrays: dict[str, Any]) -> tuple[dict[str, Any], int]:
    layout: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        layout[name] = {"offset": offset, "shape": array.shape, "dtype": array.dtype.str}
        offset += array.nbytes + -array.nbytes % _ALIGN
    return layout, offset


def _checksum(header: dict[str, Any], arrays: dict[str, Any]) -> str:
    fields = {name: value for name, value in header.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for array in arrays.values():
        digest.update(array.data)
    return digest.hexdigest()


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGN))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        prefix = file.read(_PREFIX)
        if prefix[: len(MAGIC)] != MAGIC:
            raise IndexFileError(f"{path} is no draft index; `tasc build-index` makes one")
        length = int.from_bytes(prefix[len(MAGIC) :], "little")
        encoded = file.read(min(length, _MOST_HEADER))
    try:
        header = json.loads(encoded)
        version = header["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IndexFileError(f"{path} has a damaged header; fetch it again") from error
    if version != FORMAT:
        raise IndexFormatError(
            f"{path} has format {version}, this program reads format {FORMAT}; "
            "build the index again with this version"
        )
    begin = _PREFIX + length
    return header, begin + -begin % _ALIGN


def _view(body: Any, place: dict[str, Any]) -> Any:
    """One array of a mapped file, without a copy; ValueError where it does not lie in the file."""
    if place["dtype"] not in _DTYPES:
        raise ValueError(f"{place} is of none of the types {_DTYPES}")
    kind, shape, begin = np.dtype(place["dtype"]), tuple(place["shape"]), place["offset"]
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if begin < 0 or size < 0 or begin + size > len(body):
        raise ValueError(f"{place} lies outside of the file's {len(body)} bytes")
    return np.asarray(body[begin : begin + size]).view(kind).reshape(shape)
