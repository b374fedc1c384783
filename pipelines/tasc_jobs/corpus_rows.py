"""Corpus rows out of files, and for every line that gives none, why. It writes nothing anywhere."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasc_jobs import json_lines, parquet_rows
from tasc_jobs.errors import FileError
from tasc_jobs.records import RawRecord
from tasc_store import CorpusRow

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MAX_LINE_BYTES = 1 << 20
_HASH_DIGITS = 16


@dataclass(frozen=True)
class BadRow:
    """A line that gives no row.

    ``line`` counts from 1 (in Parquet: rows); ``text`` is its first 200 characters.
    """

    file: str
    line: int
    reason: str
    text: str


class _RefusedError(ValueError):
    """Why a record is no row."""


def check_file(path: Path, columns: Sequence[str]) -> None:
    """Opens the file and looks at its beginning.

    Raises:
        FileError: Wrong suffix, not there, not readable, not what its suffix says, or a Parquet
            file without one of the columns.
    """
    try:
        if _is_parquet(path):
            parquet_rows.check_parquet(path, columns)
        else:
            json_lines.check_json_lines(path)
    except (*json_lines.DAMAGED, *parquet_rows.DAMAGED) as error:
        raise FileError(f"cannot read rows from {path}: {error}") from error


def read_rows(
    path: Path,
    input_field: str,
    output_field: str,
    id_field: str,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[CorpusRow | BadRow]:
    """The file's rows in order, streamed; a bad line becomes a `BadRow` and reading goes on.

    A row's key is its id (a string or an integer) or, where it has none, ``<hash>:<line>`` with
    the first 16 hex digits of the SHA-256 of the file as it lies on disk; so reading the same file
    again gives the same keys. The input may be empty, the output may not.

    Args:
        path: ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        input_field: Name of the field (column) with the task's input.
        output_field: Name of the field with its output.
        id_field: Name of the field with the row's id; absent or null is no id.
        max_line_bytes: A longer line is a bad row.

    Raises:
        FileError: Another suffix.
        ArrowException, OSError: The file cannot be opened (`check_file` tells before), or the disk
            fails.
    """
    file_hash = functools.cache(lambda: _file_hash(path))
    records = (
        parquet_rows.read_parquet(path, (input_field, output_field, id_field), max_line_bytes)
        if _is_parquet(path)
        else json_lines.read_json_lines(path, max_line_bytes)
    )
    for record in records:
        try:
            row = CorpusRow(
                _key(record, id_field, file_hash),
                _string(record.value, input_field),
                _output(record.value, output_field),
            )
        except ValueError as error:  # ours, or the row's own checks
            yield BadRow(str(path), record.line, str(error), record.text)
        else:
            yield row


def _is_parquet(path: Path) -> bool:
    if not path.name.endswith(SUFFIXES):
        raise FileError(f"{path} is none of {', '.join(SUFFIXES)}; convert or rename it")
    return path.suffix == ".parquet"


def _key(record: RawRecord, field: str, file_hash: Callable[[], str]) -> str:
    if record.reason:
        raise _RefusedError(record.reason)
    if not isinstance(record.value, dict):
        raise _RefusedError("not a JSON object")
    found = record.value.get(field)
    if found is None:
        return f"{file_hash()}:{record.line}"
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise _RefusedError(f"field {field!r} is neither a string nor an integer")
    return str(found)


def _output(value: dict[str, Any], field: str) -> str:
    output = _string(value, field)
    if not output.strip():
        raise _RefusedError("empty output")
    return output


def _string(value: dict[str, Any], field: str) -> str:
    if field not in value:
        raise _RefusedError(f"no field {field!r}")
    if not isinstance(value[field], str):
        raise _RefusedError(f"field {field!r} is not a string")
    return str(value[field])


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_HASH_DIGITS]


def last_words(text: str, most: int) -> str:
    """The last words, at most so many, joined by blanks; "" if there are none."""
    return " ".join(text.rsplit(maxsplit=most)[-most:]) if most else ""
