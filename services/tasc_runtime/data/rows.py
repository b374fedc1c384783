"""Rows in files: JSON lines, plain or gzipped, and Parquet, read one by one and written whole.

Reading holds one line, or one Parquet page, in memory. A line that gives no row does not end the
reading: it comes with its number and the reason. Files are written under another name first, so
that a reader never sees half of one.
"""

import functools
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_runtime.data.file_kinds import HEAD_BYTES, MARK, wrong_kind
from tasc_runtime.data.row_texts import MESSAGES, RowTexts
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MAX_ROW_BYTES = 1 << 20
_DAMAGED_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
_DAMAGED_PARQUET = (pa.ArrowException, OSError)
_HASH_DIGITS = 16
_SHOWN_CHARACTERS = 200
_BLOCK_BYTES = 1 << 20
_SKIP_BYTES = 1 << 16
_READ_ROWS, _WRITE_ROWS = 256, 10_000  # of Parquet, at once


@dataclass(frozen=True)
class Fields:
    """Names of a row's fields (in Parquet: columns)."""

    input: str = "input"
    output: str = "output"
    id: str = "id"


@dataclass(frozen=True)
class RawRow:
    """What stands on one line, whatever fields it has.

    Attributes:
        line: Counts from 1; in Parquet it counts rows.
        value: The parsed JSON, or a Parquet row as a dictionary.
        text: The line's first 200 characters.
        reason: Why the line cannot be read; empty if it can.
    """

    line: int
    value: Any
    text: str
    reason: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The value; raises ValueError, with the reason, where it is no object."""
        if not self.reason and isinstance(self.value, dict):
            return self.value
        raise ValueError(self.reason or "not a JSON object")


@dataclass(frozen=True)
class BadRow:
    """A line that gives no corpus row; the attributes are those of a `RawRow`."""

    file: str
    line: int
    reason: str
    text: str


def check_file(path: Path, columns: Sequence[str] = ()) -> None:
    """Open a file of rows and look at its beginning.

    Raises:
        FileError: The suffix is not known, the file is missing, unreadable or not what its suffix
            says, it holds something else than a JSON object on each line, or a Parquet file lacks
            one of the columns.
    """
    _require_suffix(path)
    try:
        if path.suffix != ".parquet":
            with closing(_open(path)) as stream:
                # A whole read would fail where a short file is damaged further behind.
                if words := wrong_kind(stream.read1(HEAD_BYTES)):
                    raise FileError(f"{path} {words}")
            return
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
    except (*_DAMAGED_GZIP, *_DAMAGED_PARQUET) as error:
        raise FileError(f"cannot read rows from {path}: {error}") from error
    missing = [column for column in columns if column not in names]
    if missing and MESSAGES not in names:
        raise FileError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(names)}: name the one to use"
        )


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def count_rows(path: Path) -> tuple[int, str]:
    """Rows of a file, blank lines counted, and the SHA-256 of the file as it lies on disk.

    A damaged gzip file counts the lines before the damage and one more for the rest.

    Raises:
        OSError: The file cannot be opened or read.
    """
    digest = hashlib.sha256()
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return _count_lines(file, digest.update), digest.hexdigest()
    found = file_sha256(path)
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows), found
    with gzip.open(path) as stream:
        return _count_lines(stream, lambda block: None), found


def read_corpus(
    paths: Sequence[Path], fields: Fields, refused: Callable[[BadRow], None] = lambda bad: None
) -> Iterator[CorpusRow]:
    """Rows of several files in order. All files are checked before the first row comes.

    Args:
        refused: Called with each line that gives no row.

    Raises:
        FileError: A file cannot be read.
    """
    for path in paths:
        check_file(path, (fields.input, fields.output))
    for path in paths:
        for row in read_rows(path, fields):
            if isinstance(row, CorpusRow):
                yield row
            else:
                refused(row)


def read_rows(
    path: Path, fields: Fields, *, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[CorpusRow | BadRow]:
    """Corpus rows of one file in order.

    The key of a row is its id, a string or a whole number. A row without an id gets
    ``<hash>:<line>`` with the first 16 hex digits of the file's SHA-256, so reading the same file
    again gives the same keys. The input may be empty, the output may not. Values that are no texts
    are read as `RowTexts` says.

    Raises:
        FileError: The suffix is not known.
        ArrowException, OSError: The file cannot be opened (`check_file` says so before), or the
            disk fails.
    """
    _require_suffix(path)
    file_hash = functools.cache(lambda: file_sha256(path)[:_HASH_DIGITS])
    texts = RowTexts(str(path))
    columns = (fields.input, fields.output, fields.id)
    for record in read_raw_rows(path, columns, max_row_bytes=max_row_bytes):
        try:
            yield _corpus_row(record, fields, texts, file_hash)
        except ValueError as error:  # ours, or that of CorpusRow
            yield BadRow(str(path), record.line, str(error), record.text)


def read_raw_rows(
    path: Path, columns: Sequence[str] | None = None, *, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[RawRow]:
    """Every line of a file in order, except blank ones, or every row of a Parquet file.

    Where a gzip file is damaged, one record with the reason stands for the rest; in Parquet, for
    the rest of the row group.

    Args:
        columns: Of a Parquet file, read only those of these that it has, and ``messages`` where one
            before the last, the id, is missing; None reads all.
        max_row_bytes: A longer line is not kept in memory; its record says so.

    Raises:
        ArrowException, OSError: The file cannot be opened, or the disk fails.
    """
    if path.suffix == ".parquet":
        yield from _parquet_records(path, columns, max_row_bytes)
        return
    line = 0
    try:
        for line, raw in read_lines(path, max_row_bytes):
            if len(raw) > max_row_bytes:
                yield RawRow(line, None, _shown(raw), _too_long(max_row_bytes))
            elif raw.strip():
                yield _parsed(line, raw)
    except _DAMAGED_GZIP as error:
        yield RawRow(line + 1, None, "", f"damaged gzip, the rest is lost: {error}")


def read_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, without the line's end and without a byte order mark.

    A mark may stand before each line, since files are joined by ``cat``. Of a longer line the first
    ``max_bytes + 1`` bytes come, so its length tells.

    Raises:
        OSError: The file cannot be opened or read.
        EOFError, zlib.error: A gzip file is damaged.
    """
    with closing(_open(path)) as stream:
        line = 0
        while raw := stream.readline(len(MARK) + max_bytes + 1):
            line, rest = line + 1, raw
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(_SKIP_BYTES)
            yield line, raw.removeprefix(MARK).removesuffix(b"\n")[: max_bytes + 1]


def json_line(value: Any) -> bytes:
    """A value as one line of JSON in UTF-8; lone surrogates become JSON's escapes."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


@contextmanager
def whole_file(path: Path, tag: str = "") -> Iterator[IO[bytes]]:
    """A file to write, which takes its place when the block ends without an error.

    The file outlives a failing machine from then on.

    Args:
        tag: Part of the unfinished file's name; unique where several processes may write the file.
    """
    partial = path.with_name(f"{path.name}{tag}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def row_writer(path: Path, schema: Any = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes one row after another to a `whole_file`.

    Args:
        path: A ``.parquet`` file is written as such, any other as JSON lines.
        schema: A `pyarrow.Schema`; needed for Parquet only.
    """
    with whole_file(path) as file:
        if path.suffix != ".parquet":
            yield lambda row: _write_line(file, row)
            return
        rows: list[dict[str, Any]] = []
        with pq.ParquetWriter(file, schema) as writer:

            def flush() -> None:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()

            def write(row: dict[str, Any]) -> None:
                rows.append(row)
                if len(rows) == _WRITE_ROWS:
                    flush()

            yield write
            if rows:
                flush()


def _write_line(file: IO[bytes], row: dict[str, Any]) -> None:
    file.write(json_line(row))


def _require_suffix(path: Path) -> None:
    if not path.name.endswith(SUFFIXES):
        raise FileError(f"{path} is none of {', '.join(SUFFIXES)}; convert or rename it")


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _count_lines(stream: IO[bytes] | gzip.GzipFile, each: Callable[[bytes], None]) -> int:
    lines, last = 0, b"\n"
    try:
        while block := stream.read(_BLOCK_BYTES):
            each(block)
            lines += block.count(b"\n")
            last = block[-1:]
    except _DAMAGED_GZIP:
        return lines + 1
    return lines + (last != b"\n")


def _corpus_row(
    record: RawRow, fields: Fields, texts: RowTexts, file_hash: Callable[[], str]
) -> CorpusRow:
    """Raises ValueError: why the record is no row."""
    row = record.fields
    key = texts.id(row, fields.id)
    found = texts.input(row, fields.input), texts.output(row, fields.output)
    return CorpusRow(f"{file_hash()}:{record.line}" if key is None else key, *found)


def _too_long(max_bytes: int) -> str:
    return f"longer than {max_bytes} bytes"


def _shown(raw: bytes) -> str:
    # A character has at most 4 bytes: a long line is not decoded whole.
    beginning = raw[: 4 * _SHOWN_CHARACTERS].decode(errors="replace")
    return beginning.rstrip("\r")[:_SHOWN_CHARACTERS]


def _parsed(line: int, raw: bytes) -> RawRow:
    try:
        return RawRow(line, json.loads(raw.decode()), _shown(raw))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "not JSON: nested too deep"
    except ValueError as error:
        reason = f"not JSON: {error}"
    return RawRow(line, None, _shown(raw), reason)


def _parquet_records(
    path: Path, columns: Sequence[str] | None, max_row_bytes: int
) -> Iterator[RawRow]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        present = None
        if columns is not None:
            wanted = columns if {*columns[:-1]} <= {*names} else (*columns, MESSAGES)
            present = [name for name in wanted if name in names]
        end = 0
        for group in range(file.num_row_groups):
            line, end = end, end + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(_READ_ROWS, row_groups=[group], columns=present):
                    for at in range(batch.num_rows):
                        line += 1
                        yield _parquet_record(line, batch, at, max_row_bytes)
            except _DAMAGED_PARQUET as error:
                reason = f"damaged Parquet, lost up to row {end}: {error}"
                yield RawRow(line + 1, None, "", reason)


def _parquet_record(line: int, batch: pa.RecordBatch, at: int, max_row_bytes: int) -> RawRow:
    value = {}
    for name in batch.schema.names:
        try:
            value[name] = batch.column(name)[at].as_py()
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 in column {name!r} at byte {error.start}"
            return RawRow(line, None, "", reason)
    text = json.dumps(value, ensure_ascii=False, default=str)
    reason = _too_long(max_row_bytes) if len(text.encode()) > max_row_bytes else ""
    return RawRow(line, value, text[:_SHOWN_CHARACTERS], reason)
