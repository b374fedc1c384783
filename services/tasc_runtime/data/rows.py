"""Rows in files of JSON lines, plain or gzipped, or Parquet: read one by one, written whole.

Reading holds one line, or at most 256 rows of a Parquet file, in memory. A line that is not a row
does not end the reading, but is returned with its number and the reason. Files are written under a
temporary name first, so that a reader never sees an incomplete file.

`read_tables` reads blocks of about 1 MiB, with Arrow where that gives the same rows. Arrow's reader
of JSON accepts what Python's refuses, such as two objects on a line or ``Inf``, and a deep value
ends the process. It therefore reads only blocks in which each line begins and ends with a brace,
and only the fields of the first line, all with texts, whole numbers or booleans. Then a line break
cannot be within a value, and as many rows as lines mean one row on each line.
"""

import functools
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, starmap
from pathlib import Path
from typing import IO, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_draft.files import whole_file
from tasc_runtime.data.file_kinds import HEAD_BYTES, MARK, wrong_kind
from tasc_runtime.data.row_texts import MESSAGES, RowTexts
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MAX_ROW_BYTES = 1 << 20
ALL = (0, sys.maxsize)
_DAMAGED_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
_DAMAGED_PARQUET = (pa.ArrowException, OSError)
_HASH_DIGITS = 16
_SHOWN_CHARACTERS = 200
_BLOCK_BYTES = 1 << 20
_SKIP_BYTES = 1 << 16
_READ_ROWS, _WRITE_ROWS = 256, 10_000  # rows of Parquet at once
_READ_BYTES, _WRITE_BYTES = 32 << 20, 64 << 20  # approximate maximum, but at least one row
_SIDES = pa.schema([("input", pa.large_string()), ("output", pa.large_string())])
_JSON_TYPES = {str: pa.string(), int: pa.int64(), bool: pa.bool_()}
_Marked: TypeAlias = tuple[int, bytes, str]
"""The number of a line, its bytes, and why it cannot be read, if so."""


@dataclass(frozen=True)
class Fields:
    """Names of a row's fields (in Parquet: columns)."""

    input: str = "input"
    output: str = "output"
    id: str = "id"


@dataclass(frozen=True)
class RawRow:
    """The content of one line, with any fields.

    Attributes:
        line: Line number from 1; in Parquet, the number of the row.
        value: The parsed JSON, or a Parquet row as a dictionary.
        text: The line's first 200 characters.
        reason: Why the line cannot be read; empty if it can.
        kept: All columns of a Parquet row, if requested, as arrays of length 1.
    """

    line: int
    value: Any
    text: str
    reason: str = ""
    kept: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Returns the value; raises ValueError, with the reason, if it is not an object."""
        if not self.reason and isinstance(self.value, dict):
            return self.value
        raise ValueError(self.reason or "not a JSON object")


@dataclass(frozen=True)
class BadRow:
    """A line that is not a corpus row; the attributes mean the same as in `RawRow`."""

    file: str
    line: int
    reason: str
    text: str


def check_file(path: Path, columns: Sequence[str] = (), opened: Any = None) -> None:
    """Opens a file of rows and checks its beginning.

    Args:
        opened: The file, if it is open already, as in `read_raw_rows`.

    Raises:
        FileError: The suffix is unknown; the file is missing, unreadable or not of the type that
            its suffix names; its lines are not JSON objects; or a Parquet file lacks one of the
            columns.
    """
    _require_suffix(path)
    try:
        if path.suffix != ".parquet":
            with closing(_open(path, opened)) as stream:
                # `read` would fail on a short file that is damaged after its beginning.
                if words := wrong_kind(stream.read1(HEAD_BYTES)):
                    raise FileError(f"{path} {words}")
            return
        names = pq.read_schema(opened or path).names
    except (*_DAMAGED_GZIP, *_DAMAGED_PARQUET) as error:
        if opened is not None and type(error) is OSError:
            raise  # it may be the connection
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
    """Counts the rows of a file, including blank lines, and computes the file's SHA-256.

    In a damaged gzip file, the lines before the damage count, and the rest counts as one.

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
    """Yields rows of several files in order. All files are checked before the first row.

    Args:
        refused: Called with each line that is not a row.

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
    """Yields the corpus rows of one file in order.

    The key of a row is its id, a string or a whole number. A row without an id gets
    ``<hash>:<line>`` with the first 16 hex digits of the file's SHA-256, so reading the same file
    again gives the same keys. The input may be empty, but not the output. Values that are not texts
    are read by `RowTexts`.

    Raises:
        FileError: The suffix is unknown.
        ArrowException, OSError: The file cannot be opened (`check_file` detects this earlier), or
            the disk fails.
    """
    _require_suffix(path)
    columns = (fields.input, fields.output, fields.id)
    records = read_raw_rows(path, columns, max_row_bytes=max_row_bytes)
    yield from map(_row_reader(path, fields), records)


def read_tables(
    paths: Sequence[Path],
    fields: Fields,
    refused: Callable[[BadRow], None] = lambda bad: None,
    read: Callable[[int], None] = lambda rows: None,
) -> Iterator[pa.Table]:
    """Yields the rows of `read_corpus`, as tables with the columns input and output (large_string).

    A table has at least one row, and about 1 MiB of lines or 256 rows of a Parquet file.

    Args:
        refused: Called with each line that is not a row.
        read: Called with the number of rows that were read since the last call.

    Raises:
        FileError: A file cannot be read.
    """
    for path in paths:
        check_file(path, (fields.input, fields.output))
    for path in paths:
        row_of = _row_reader(path, fields)
        for table, records in _blocks(path, fields):
            if table:
                read(table.num_rows)
                yield table
                continue
            rows = list[tuple[str, str]]()
            for row in map(row_of, records):
                if isinstance(row, BadRow):
                    refused(row)
                else:
                    rows.append((row.input, row.output))
                    read(1)
            if rows:
                yield pa.table(list(zip(*rows, strict=True)), schema=_SIDES)


def _blocks(path: Path, fields: Fields) -> Iterator[tuple[pa.Table | None, Iterable[RawRow]]]:
    """Yields blocks of a file, each as a table if Arrow reads it alike, and as its records."""
    if path.suffix == ".parquet":
        records = read_raw_rows(path, (fields.input, fields.output, fields.id))
        while some := list(islice(records, _READ_ROWS)):
            yield None, some
        return
    held, size = list[_Marked](), 0
    for marked in chain(_marked_lines(path, MAX_ROW_BYTES), [None]):
        if marked:
            held.append(marked)
            size += len(marked[1])
        if size >= _BLOCK_BYTES or not marked:
            yield _arrow_table(held, fields), filter(None, starmap(_raw_row, held))
            held, size = [], 0


def _arrow_table(marked: Sequence[_Marked], fields: Fields) -> pa.Table | None:
    """Returns inputs and outputs; None if Arrow may read a line in another way than `read_rows`."""
    lines = [line for _, raw, _ in marked if (line := raw.strip(b" \t\r"))]
    block, sides = b"\n".join(lines), [fields.input, fields.output]
    whole = block[:1] + block[-1:] == b"{}" and block.count(b"}\n{") == len(lines) - 1
    if not whole or any(reason for *_, reason in marked) or MESSAGES in sides:
        return None
    # Imported here, because few processes read tables.
    from pyarrow import compute
    from pyarrow import json as arrow_json

    try:
        first = json.loads(lines[0].decode())
        kinds = pa.schema([(name, _JSON_TYPES[type(value)]) for name, value in first.items()])
        table = arrow_json.read_json(
            pa.BufferReader(block),
            arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            arrow_json.ParseOptions(explicit_schema=kinds, unexpected_field_behavior="error"),
        )
        table.validate(full=True)  # UTF-8
        found, key = table.select(sides), first.get(fields.id)
    except (ValueError, KeyError, RecursionError, pa.ArrowException):
        return None
    texts = found.schema.types == [pa.string()] * 2 and not isinstance(key, bool)
    if not texts or table.num_rows != len(lines) or any(c.null_count for c in found.columns):
        return None
    filled = [compute.utf8_trim_whitespace(found[1])]
    filled += [table[fields.id]] if isinstance(key, str) else []
    empty = any(compute.index(column, "").as_py() >= 0 for column in filled)
    return None if empty else found.rename_columns(_SIDES.names).cast(_SIDES)


def _row_reader(path: Path, fields: Fields) -> Callable[[RawRow], CorpusRow | BadRow]:
    file_hash = functools.cache(lambda: file_sha256(path)[:_HASH_DIGITS])
    texts = RowTexts(str(path))

    def row(record: RawRow) -> CorpusRow | BadRow:
        try:
            return _corpus_row(record, fields, texts, file_hash)
        except ValueError as error:  # raised above or by CorpusRow
            return BadRow(str(path), record.line, str(error), record.text)

    return row


def read_raw_rows(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    max_row_bytes: int = MAX_ROW_BYTES,
    keep: bool = False,
    opened: Any = None,
    between: tuple[int, int] = ALL,
) -> Iterator[RawRow]:
    """Yields each line of a file in order, except blank ones, or each row of a Parquet file.

    In a damaged gzip file, one record with the reason replaces the rest of the file. In a damaged
    Parquet file, the record replaces the rest of the row group.

    Args:
        columns: Columns to read of a Parquet file, the id last; None: all. Missing columns are
            skipped. If a column other than the id is missing, ``messages`` is read too.
        max_row_bytes: Maximum size of a line; for Parquet, of the read columns of a row as JSON.
            Longer lines are not kept in memory, and their record has a reason.
        keep: Whether rows of a Parquet file also have all columns in `RawRow.kept`. Kept columns
            have no separate limit: about 32 MiB of rows are read at once, or one larger row.
        opened: The file as a seekable `pyarrow.NativeFile`, if it is not at ``path`` on a disk.
        between: With ``opened``, the part to read. For Parquet: after how many rows it begins and
            ends. For JSON lines: the bytes in which its lines begin; lines then count from 1 in the
            part. A gzip file has only one part.

    Raises:
        ArrowException, OSError: The file cannot be opened, or the disk fails.
    """
    if path.suffix == ".parquet":
        yield from _parquet_records(opened or path, columns, max_row_bytes, keep, between)
        return
    marked = _marked_lines(path, max_row_bytes, opened, between)
    yield from filter(None, starmap(_raw_row, marked))


def _marked_lines(path: Path, max_bytes: int, *part: Any) -> Iterator[_Marked]:
    line = 0
    try:
        for line, raw in read_lines(path, max_bytes, *part):
            yield line, raw, _too_long(max_bytes) if len(raw) > max_bytes else ""
    except _DAMAGED_GZIP as error:
        yield line + 1, b"", f"damaged gzip, the rest is lost: {error}"


def _raw_row(line: int, raw: bytes, reason: str) -> RawRow | None:
    """Parses one of the `_marked_lines`; a blank line gives None."""
    if reason:
        return RawRow(line, None, _shown(raw), reason)
    return _parsed(line, raw) if raw.strip() else None


def read_lines(
    path: Path, max_bytes: int, opened: Any = None, between: tuple[int, int] = ALL
) -> Iterator[tuple[int, bytes]]:
    """Yields lines with their numbers from 1, without line ends and byte order marks.

    A byte order mark may precede any line, since files are joined by ``cat``. A longer line is cut
    to its first ``max_bytes + 1`` bytes, so its length shows that it is too long.

    Args:
        opened, between: See `read_raw_rows`.

    Raises:
        OSError: The file cannot be opened or read.
        EOFError, zlib.error: A gzip file is damaged.
    """
    with closing(_open(path, opened, between)) as stream:
        line = 0
        while raw := stream.readline(len(MARK) + max_bytes + 1):
            line, rest = line + 1, raw
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(_SKIP_BYTES)
            yield line, raw.removeprefix(MARK).removesuffix(b"\n")[: max_bytes + 1]


def json_line(value: Any) -> bytes:
    """Encodes a value as one line of JSON in UTF-8; lone surrogates become escapes."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


@contextmanager
def row_writer(path: Path, schema: Any = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Returns a function that writes rows to a `whole_file`, one after another.

    Args:
        path: A ``.parquet`` file is written as such, any other as JSON lines.
        schema: A `pyarrow.Schema`; needed for Parquet only. A value for Parquet may be an array of
            length 1, which is written as it is. Up to 10,000 rows or about 64 MiB are in memory.
    """
    with whole_file(path) as file:
        if path.suffix != ".parquet":

            def write_line(row: dict[str, Any]) -> None:
                file.write(json_line(row))

            yield write_line
            return
        rows: list[dict[str, Any]] = []
        size = 0
        with pq.ParquetWriter(file, schema) as writer:

            def flush() -> None:
                nonlocal size
                columns = [_column([row.get(f.name) for row in rows], f.type) for f in schema]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                rows.clear()
                size = 0

            def write(row: dict[str, Any]) -> None:
                nonlocal size
                rows.append(row)
                size += _size(row)
                if len(rows) == _WRITE_ROWS or size >= _WRITE_BYTES:
                    flush()

            yield write
            if rows:
                flush()


def _column(values: list[Any], type_: pa.DataType) -> pa.Array:
    if not any(isinstance(value, pa.Array) for value in values):
        return pa.array(values, type_)
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    kept = (pa.nulls(1, plain) if value is None else value for value in values)
    whole = pa.concat_arrays([one if one.type == plain else one.cast(plain) for one in kept])
    return whole if plain is type_ else whole.dictionary_encode().cast(type_)


def _size(value: Any) -> int:
    """The approximate size of a value in bytes."""
    match value:
        case str() | bytes():
            return len(value)
        case pa.Array():
            return int(value.nbytes)
        case dict():
            return sum(map(_size, value.values()))
        case list() | tuple():
            return sum(map(_size, value))
    return 8


def _require_suffix(path: Path) -> None:
    if not path.name.endswith(SUFFIXES):
        raise FileError(f"{path} is none of {', '.join(SUFFIXES)}; convert or rename it")


def _open(
    path: Path, opened: Any = None, between: tuple[int, int] = ALL
) -> io.BufferedReader | gzip.GzipFile:
    if opened is None:
        return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    if path.suffix == ".gz":
        return gzip.open(io.BufferedReader(opened.get_stream(0, opened.size()), _BLOCK_BYTES), "rb")
    begin, end = (_line_start(opened, at) for at in between)
    # An object store gets one request for each block.
    return io.BufferedReader(opened.get_stream(begin, end - begin), _BLOCK_BYTES)


def _line_start(file: Any, at: int) -> int:
    """Returns where the first line begins that does not begin before ``at``."""
    if at <= 0:
        return 0
    file.seek(min(at - 1, file.size()))
    while block := file.read(_SKIP_BYTES):
        if (found := block.find(b"\n")) >= 0:
            return int(file.tell()) - len(block) + found + 1
    return int(file.size())


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
    """Makes a corpus row; raises ValueError, with the reason, if the record is not a row."""
    row = record.fields
    key = texts.id(row, fields.id)
    found = texts.input(row, fields.input), texts.output(row, fields.output)
    return CorpusRow(f"{file_hash()}:{record.line}" if key is None else key, *found)


def _too_long(max_bytes: int) -> str:
    return f"longer than {max_bytes} bytes"


def _shown(raw: bytes) -> str:
    # A character has at most 4 bytes, so a long line need not be decoded completely.
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
    source: Any,
    columns: Sequence[str] | None,
    max_row_bytes: int,
    keep: bool,
    between: tuple[int, int],
) -> Iterator[RawRow]:
    first, last = between
    with pq.ParquetFile(source) as file:
        names = file.schema_arrow.names
        present = names
        if columns is not None:
            wanted = columns if {*columns[:-1]} <= {*names} else (*columns, MESSAGES)
            present = [name for name in wanted if name in names]
        end = 0
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group)
            line, end = end, end + found.num_rows
            if end <= first or line >= last:
                continue
            row_bytes = max(1, found.total_byte_size // max(1, found.num_rows))
            at_once = max(1, min(_READ_ROWS, _READ_BYTES // row_bytes))
            read = None if keep else present
            try:
                for batch in file.iter_batches(at_once, row_groups=[group], columns=read):
                    before, line = line, line + batch.num_rows
                    if line <= first:
                        continue
                    kept_columns = map(_plain, batch.columns) if keep else ()
                    whole = dict(zip(names, kept_columns, strict=keep))
                    for at in range(max(0, first - before), min(batch.num_rows, last - before)):
                        record = _parquet_record(before + at + 1, batch, present, at, max_row_bytes)
                        kept = {name: column.slice(at, 1) for name, column in whole.items()}
                        yield replace(record, kept=kept) if keep else record
                    if line >= last:  # the next batch may be damaged
                        break
            except _DAMAGED_PARQUET as error:
                if not isinstance(source, Path):
                    raise  # it may be the connection
                reason = f"damaged Parquet, lost up to row {end}: {error}"
                yield RawRow(max(line, first) + 1, None, "", reason)


def _plain(column: pa.Array) -> pa.Array:
    """The column without a dictionary, which each slice would otherwise include completely."""
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


def _parquet_record(
    line: int, batch: pa.RecordBatch, names: Sequence[str], at: int, max_row_bytes: int
) -> RawRow:
    value = {}
    for name in names:
        try:
            value[name] = batch.column(name)[at].as_py()
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 in column {name!r} at byte {error.start}"
            return RawRow(line, None, "", reason)
        except (ValueError, OverflowError) as error:  # a time that Python cannot represent
            return RawRow(line, None, "", f"column {name!r} cannot be read: {error}")
    text = json.dumps(value, ensure_ascii=False, default=str)
    reason = ""
    if (size := len(text.encode())) > max_row_bytes:
        largest = max(value, key=lambda name: len(str(value[name])))
        reason = f"{_too_long(max_row_bytes)}: {size} bytes; shorten the column {largest!r}"
    return RawRow(line, value, text[:_SHOWN_CHARACTERS], reason)
