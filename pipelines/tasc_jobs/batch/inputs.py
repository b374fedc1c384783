"""Input of a batch job: files, folders of them, or a task's corpus in Redis, streamed as rows.

A line that gives no row keeps its place in the order, with the reason; so does a row whose id an
earlier row has. Ids are remembered in bounded memory. A fingerprint tells a changed input.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_jobs.batch.columns import OwnColumns, OwnRow, beside
from tasc_jobs.batch.work import Row
from tasc_jobs.errors import EmptyCorpusError, JobError, UsageError, require_writable
from tasc_runtime.data.row_texts import RowTexts
from tasc_runtime.data.rows import (
    MAX_ROW_BYTES,
    SUFFIXES,
    RawRow,
    check_file,
    count_rows,
    read_raw_rows,
)
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow, CorpusStore, connect
from tasc_text import is_unicode

_CORPUS_BATCH = 1000
_CACHE_KIB = 32 << 10
_DIGEST_BYTES = 16
REDIS = "redis:"  # in front of a task's name, in place of a file
_JSON = ("", ".jsonl", ".json", ".ndjson")
_CORPUS = pa.schema([("input", pa.string()), ("output", pa.string())])


@dataclass(frozen=True)
class Source:
    """Where rows come from, and which of their fields count.

    Attributes:
        given: Files and folders, or one ``redis:TASK``.
        keep_columns: Whether all fields of a row are kept beside its answer.
    """

    given: tuple[str, ...]
    input_field: str = "input"
    id_field: str = "id"
    keep_columns: bool = False

    @classmethod
    def of(cls, *paths: Path | str, **fields: Any) -> "Source":
        return cls(tuple(map(str, paths)), **fields)

    @property
    def files(self) -> list[Path]:
        """The files and folders; empty for a corpus."""
        return [] if self.is_corpus else [Path(one) for one in self.given]

    @property
    def is_corpus(self) -> bool:
        return any(one.startswith(REDIS) for one in self.given)


def job_folder(output: Path) -> Path:
    """The folder with the state of a job that writes this output."""
    return output.with_name(output.name + ".job")


def reject_file(output: Path) -> Path:
    """The default file for rows without an answer; no other output has the same."""
    return output.with_name(f"{output.name}.rejected.jsonl")


def named_from(reject: Path, output: Path) -> str:
    """The output of a job, as each row of its file of rejected rows names it."""
    return os.path.relpath(output.resolve(), reject.resolve().parent)


def require_own(reject: Path, output: Path) -> None:
    """Raises JobError if the file has rejected rows of another output, or other content."""
    try:
        with reject.open("rb") as file:
            line = file.readline(MAX_ROW_BYTES)
        owner = json.loads(line).get("output") if line else named_from(reject, output)
    except FileNotFoundError:
        return
    except (ValueError, AttributeError):
        owner = None
    if owner != named_from(reject, output):
        content = "other content" if owner is None else f"the rejected rows of {owner}"
        raise JobError(
            f"{reject} has {content}, which would be lost; name another file with --reject, or "
            "move that one away"
        )


def files_of(given: Sequence[Path]) -> list[tuple[str, Path]]:
    """List files with their names; those of a folder are sorted, and named without the folder.

    Raises:
        FileError: A file is missing or named twice, or a folder has no files of rows.
    """
    found: dict[Path, str] = {}
    for path in given:
        if not path.exists():
            raise FileError(f"cannot read rows from {path}: it is not there; correct its name")
        inside = [p for p in sorted(path.iterdir()) if _is_rows(p)] if path.is_dir() else [path]
        if not inside:
            raise FileError(f"folder {path} has no {', '.join(SUFFIXES)}; name one that has")
        for file in inside:
            if file.resolve() in found:
                raise FileError(f"{file} is named twice; its rows can be answered once")
            found[file.resolve()] = str(file.relative_to(path)) if path.is_dir() else str(file)
    names = list(found.values())
    if double := next((name for name in names if names.count(name) > 1), None):
        raise FileError(f"two folders have a file {double}; rename one, or name one folder")
    return [(name, path) for path, name in found.items()]


def check_places(source: Source, output: Path, reject: Path) -> None:
    """Look at the beginning of each file that is read, and at the places that are written to.

    Raises:
        UsageError: A file is not what its suffix says, or would be written to, a corpus is named
            with something else, no file can be written to a place, or the one for rejected rows
            has those of another output.
    """
    if source.is_corpus and len(source.given) > 1:
        named = " and ".join(source.given)
        raise UsageError(f"--input: {named}: a corpus is read alone; name one input")
    try:
        for _, path in files_of(source.files):
            check_file(path, (source.input_field,))
    except FileError as error:
        raise UsageError(f"--input: {error}") from error
    if output.suffix not in (*_JSON, ".parquet"):
        raise UsageError(f"--output: {output} is neither .jsonl nor .parquet; name it so")
    if output.resolve() == reject.resolve():
        raise UsageError(f"--reject: {reject} is the output too; name another")
    for option, path in (("--output", output), ("--reject", reject)):
        require_writable(option, path)
        for one in source.files:
            if path.resolve() == one.resolve() or (
                one.is_dir() and path.resolve().parent == one.resolve()
            ):
                raise UsageError(f"{option} is {path}, and {one} is read; name another place")
    try:
        require_own(reject, output)
    except JobError as error:
        raise UsageError(f"--reject: {error}") from error


@dataclass(frozen=True)
class Input:
    """An input that was looked at.

    Attributes:
        pins: The input's fingerprint, for JSON.
        total: Number of rows; blank lines count here only.
        rows: Opens the input. It gives the same rows in the same order each time.
        own: The columns that are kept beside the answers, if any are.
    """

    pins: Any
    total: int
    rows: Callable[[], Iterator[Row]]
    own: OwnColumns | None = None


def open_input(source: Source, url: str, begun: Any = None) -> Input:
    """Look at what a job is to read.

    Args:
        begun: The fingerprint that the input had when the job began, if it has begun.

    Raises:
        FileError: A file cannot be read, or there are no rows.
        EmptyCorpusError: The corpus has no rows, or fewer than it had.
    """
    if source.files:
        return open_files(source.files, source.input_field, source.id_field, source.keep_columns)
    task = source.given[0].removeprefix(REDIS)
    same = isinstance(begun, dict) and begun.get("corpus") == task
    return open_corpus(url, task, begun["rows"] if same else None, source.keep_columns)


def open_files(
    given: Sequence[Path], input_field: str, id_field: str, keep_columns: bool = False
) -> Input:
    """Hash each file and count its lines.

    The id of a row is its own, a string or a whole number. A row without one gets the number of its
    line, behind the name of its file if there are several.

    Raises:
        FileError: A file is missing or damaged, or there are no rows.
    """
    files = files_of(given)
    pins, total = [], 0
    for name, path in files:
        rows, digest = count_rows(path)
        pins.append({"file": name, "bytes": path.stat().st_size, "sha256": digest})
        total += rows
    if not total:
        told = " and ".join(name for name, _ in files[:3])
        raise FileError(f"{told} has no rows; there is nothing to generate")
    fields = None if keep_columns else (input_field, id_field)
    found_rows = partial(_file_rows, files, input_field, id_field, fields)
    own = _own_of_files(files, id_field) if keep_columns else None
    return Input(pins, total, found_rows, own)


def open_corpus(url: str, task: str, rows: int | None = None, keep_columns: bool = False) -> Input:
    """Look at the first and the last rows of a task's corpus, which only grows.

    Args:
        rows: How many it had when the job began; None: all it has now.

    Raises:
        EmptyCorpusError: The corpus has no rows, or fewer.
        StoreError: Redis fails.
    """
    with closing(connect(url)) as client:
        store = CorpusStore(client, task)
        found = len(store)
        total = found if rows is None else rows
        if not found or found < total:
            raise EmptyCorpusError(
                f"the corpus of task {task!r} has {found} rows, {max(total, 1)} are needed; ingest"
                " some first, or begin anew with --restart"
            )
        ends = [*store.read(0, min(total, _CORPUS_BATCH)), *store.read(max(0, total - 1), total)]
    digest = hashlib.sha256(json.dumps([[r.key, r.input] for r in ends]).encode()).hexdigest()
    pins = {"corpus": task, "rows": total, "sha256": digest}
    found_rows = partial(_corpus_rows, url, task, total)

    def own() -> Iterator[OwnRow]:
        return ({"input": row.input, "output": row.output} for row in found_rows())

    def asked() -> Iterator[Row]:
        return (Row(n, row.key, row.input, n + 1) for n, row in enumerate(found_rows()))

    return Input(pins, total, asked, OwnColumns(own, _CORPUS) if keep_columns else None)


def _own_of_files(files: Sequence[tuple[str, Path]], id_field: str) -> OwnColumns:
    def rows() -> Iterator[OwnRow]:
        for _, path in files:
            for record in read_raw_rows(path):
                row = record.value if isinstance(record.value, dict) else {}
                yield {name: row[own] for own, name in beside(row, id_field).items()}

    return OwnColumns(rows, _schema_of([path for _, path in files], id_field))


def _schema_of(files: Sequence[Path], id_field: str) -> pa.Schema | None:
    """The types of columns beside the answers, where all files are Parquet and agree."""
    if any(path.suffix != ".parquet" for path in files):
        return None
    try:
        found = pa.unify_schemas([pq.read_schema(path).remove_metadata() for path in files])
    except pa.ArrowException:
        return None
    if any(isinstance(type_, pa.BaseExtensionType) for type_ in found.types):
        return None
    names = beside(found.names, id_field).items()
    fields = ((name, found.field(own).type) for own, name in names)
    return pa.schema(list(fields))  # a column that a file lacks is null, whatever its field says


def _file_rows(
    files: Sequence[tuple[str, Path]],
    input_field: str,
    id_field: str,
    columns: Sequence[str] | None,
) -> Iterator[Row]:
    several = len(files) > 1
    ordinals = count()
    with SeenIds() as seen:
        for number, (name, path) in enumerate(files):
            texts = RowTexts(str(path))
            for record in read_raw_rows(path, columns):
                ordinal = next(ordinals)
                file = name if several else None
                row = _row(record, ordinal, file, texts, input_field, id_field)
                place = record.line * len(files) + number
                yield row if row.refused else _once(row, seen.first(row.id, place), place, files)


def _once(row: Row, first: int, here: int, files: Sequence[tuple[str, Path]]) -> Row:
    """The row, refused if an earlier one has its id."""
    if first == here:
        return row
    line, number = divmod(first, len(files))
    where = f"line {line}" if row.file is None else f"line {line} of {files[number][0]}"
    return Row(row.ordinal, row.id, "", row.line, row.file, f"id {row.id!r} is that of {where}")


def _row(
    record: RawRow, ordinal: int, file: str | None, texts: RowTexts, input_field: str, id_field: str
) -> Row:
    """The row, refused if it has no input, under its own id as far as it has one."""
    row_id = str(record.line) if file is None else f"{file}:{record.line}"
    payload, refused = "", None
    value = record.value if isinstance(record.value, dict) else {}
    try:
        if (own := texts.id(value, id_field)) is not None:
            row_id = own
        payload = texts.input(record.fields, input_field)
        if not is_unicode(f"{row_id}{payload}"):
            raise ValueError("it holds a lone surrogate, which no text has")
    except ValueError as error:
        payload, refused = "", str(error)
    shown = row_id.encode(errors="backslashreplace").decode()
    return Row(ordinal, shown, payload, record.line, file, refused)


def _corpus_rows(url: str, task: str, total: int) -> Iterator[CorpusRow]:
    with closing(connect(url)) as client:
        store = CorpusStore(client, task)
        for first in range(0, total, _CORPUS_BATCH):
            found = store.read(first, min(first + _CORPUS_BATCH, total))
            if len(found) < min(_CORPUS_BATCH, total - first):
                raise EmptyCorpusError(
                    f"the corpus of task {task!r} shrank below {total} rows while it was read; "
                    "run the job again when nobody deletes it"
                )
            yield from found


class SeenIds:
    """Remembers ids, by digests of 16 bytes, and where each was first seen.

    They are in a temporary SQLite file, about 40 bytes each, with 32 MiB of it in memory.
    """

    def __enter__(self) -> Self:
        self._open = sqlite3.connect("", isolation_level=None)  # no name: temporary, ours alone
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._open.execute(f"PRAGMA {pragma}")
        self._open.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, at INTEGER) WITHOUT ROWID")
        self._open.execute("BEGIN")
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def first(self, id_: str, at: int) -> int:
        """Where an id was first seen; ``at`` if it is new."""
        digest = hashlib.blake2b(id_.encode(), digest_size=_DIGEST_BYTES).digest()
        if self._open.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (digest, at)).rowcount:
            return at
        found = self._open.execute("SELECT at FROM ids WHERE id = ?", (digest,)).fetchone()
        return int(found[0])


def _is_rows(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES) and not path.name.startswith(".")
