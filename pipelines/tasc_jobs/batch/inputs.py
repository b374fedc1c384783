"""Input of a batch job: files, folders of files, or a task's corpus in Redis, streamed as rows.

An invalid line becomes a refused row with the reason, and keeps its place in the order. A row with
the id of an earlier row is refused, too. Ids are stored in bounded memory. A fingerprint of the
input detects changes.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_jobs.batch.columns import OwnColumns, OwnRow, beside
from tasc_jobs.batch.places import Place, is_url
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
REDIS = "redis:"  # prefix of a task's name that is given in place of a file
_JSON = ("", ".jsonl", ".json", ".ndjson")
_CORPUS = pa.schema([("input", pa.string()), ("output", pa.string())])


@dataclass(frozen=True)
class Source:
    """The source of the rows, and the fields that are used.

    Attributes:
        given: Files and folders, or one ``redis:TASK``.
        keep_columns: Whether the output has all fields of a row beside its answer.
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
    """Returns the folder with the state of the job that writes this output."""
    return output.with_name(output.name + ".job")


def reject_file(output: Path) -> Path:
    """Returns the default file for rows without an answer; it differs for each output."""
    return output.with_name(f"{output.name}.rejected.jsonl")


def named_from(reject: Path, output: Path) -> str:
    """Returns the path of a job's output as written in each row of its file of rejected rows."""
    return os.path.relpath(output.resolve(), reject.resolve().parent)


def require_own(reject: Path, output: Path) -> None:
    """Raises JobError if the file has the rejected rows of another output, or other content."""
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
            "move this file away"
        )


def files_of(given: Sequence[Path]) -> list[tuple[str, Path]]:
    """Lists files with their names. Files of a folder are sorted; their names omit the folder.

    Raises:
        FileError: A file is missing or given twice, or a folder has no files with rows.
    """
    found: dict[Path, str] = {}
    for path in given:
        if not path.exists():
            raise FileError(f"cannot read rows from {path}: no such file; correct the path")
        inside = [p for p in sorted(path.iterdir()) if _is_rows(p)] if path.is_dir() else [path]
        if not inside:
            raise FileError(
                f"folder {path} has no {' or '.join(SUFFIXES)} file; name another folder"
            )
        for file in inside:
            if file.resolve() in found:
                raise FileError(f"{file} is given twice; name each file once")
            found[file.resolve()] = str(file.relative_to(path)) if path.is_dir() else str(file)
    names = list(found.values())
    if double := next((name for name in names if names.count(name) > 1), None):
        raise FileError(f"two folders have a file named {double}; rename one of the files")
    return [(name, path) for path, name in found.items()]


def check_places(source: Source, output: Path, reject: Path) -> None:
    """Check the beginning of each input file, and that the output files can be written.

    Raises:
        UsageError: An input file has another format than its suffix implies, an input would be
            overwritten, a corpus is given together with another input, an output file cannot be
            written, or the file for rejected rows has the rejected rows of another output.
    """
    if source.is_corpus and len(source.given) > 1:
        named = " and ".join(source.given)
        raise UsageError(f"--input: {named}: a corpus must be the only input; name one input")
    for given in source.given:
        if is_url(given) or ("*" in given and not Path(given).exists()):
            raise UsageError(
                f"--input: {Place.of(given).shown}: URLs and patterns are read for a folder of "
                f"parts; end --output {output} with /"
            )
    try:
        for _, path in files_of(source.files):
            check_file(path, (source.input_field,))
    except FileError as error:
        raise UsageError(f"--input: {error}") from error
    if output.suffix not in (*_JSON, ".parquet"):
        raise UsageError(f"--output: {output} is neither .jsonl nor .parquet; change its suffix")
    if output.resolve() == reject.resolve():
        raise UsageError(f"--reject: {reject} is also the output; name another file")
    for option, path in (("--output", output), ("--reject", reject)):
        require_writable(option, path)
        for one in source.files:
            if path.resolve() == one.resolve() or (
                one.is_dir() and path.resolve().parent == one.resolve()
            ):
                raise UsageError(f"{option} is {path}, but {one} is an input; name another file")
    try:
        require_own(reject, output)
    except JobError as error:
        raise UsageError(f"--reject: {error}") from error


@dataclass(frozen=True)
class Input:
    """An input that was checked.

    Attributes:
        pins: The input's fingerprint as JSON values.
        total: Number of rows. Blank lines are counted, although they give no row.
        rows: Opens the input. Each call yields the same rows in the same order.
        own: The user's columns that are kept beside the answers; None if there are none.
    """

    pins: Any
    total: int
    rows: Callable[[], Iterator[Row]]
    own: OwnColumns | None = None


def open_input(source: Source, url: str, begun: Any = None) -> Input:
    """Check the input of a job.

    Args:
        begun: The fingerprint of the input at the start of the job; None for a new job.

    Raises:
        FileError: A file cannot be read, or there are no rows.
        EmptyCorpusError: The corpus has no rows, or fewer than at the start of the job.
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

    The id of a row is a string or an integer in the row. If a row has none, its id is its line
    number, preceded by the name of its file if there are several files.

    Raises:
        FileError: A file is missing or damaged, or there are no rows.
    """
    files = files_of(given)
    pins, total = _counted(files)
    if not total:
        named = " and ".join(name for name, _ in files[:3])
        raise FileError(f"{named} has no rows; there is nothing to generate")
    read = partial(read_raw_rows, columns=(input_field, id_field), keep=keep_columns)
    found_rows = partial(_file_rows, files, input_field, id_field, read)
    own = None
    if keep_columns:
        schema = _schema_of([path for _, path in files], id_field)
        unchanged = partial(_unchanged, files, pins)
        own = OwnColumns(partial(_own_rows, files, id_field, read), unchanged, schema)
    return Input(pins, total, found_rows, own)


def _counted(files: Sequence[tuple[str, Path]]) -> tuple[list[dict[str, Any]], int]:
    """Returns the fingerprint of files, and their number of rows."""
    pins, total = [], 0
    for name, path in files:
        rows, digest = count_rows(path)
        pins.append({"file": name, "bytes": path.stat().st_size, "sha256": digest})
        total += rows
    return pins, total


def _unchanged(files: Sequence[tuple[str, Path]], pins: Any) -> bool:
    try:
        return _counted(files)[0] == pins
    except (OSError, pa.ArrowException):
        return False


def open_corpus(url: str, task: str, rows: int | None = None, keep_columns: bool = False) -> Input:
    """Read the first and the last rows of a task's corpus, to which rows are only appended.

    Args:
        rows: Number of the corpus's rows at the start of the job; None uses all current rows.

    Raises:
        EmptyCorpusError: The corpus has no rows, or fewer than ``rows``.
        StoreError: Redis fails.
    """
    with closing(connect(url)) as client:
        store = CorpusStore(client, task)
        found = len(store)
        total = found if rows is None else rows
        if not found or found < total:
            raise EmptyCorpusError(
                f"the corpus of task {task!r} has {found} rows, but {max(total, 1)} are needed; "
                "ingest rows first, or discard the job with --restart"
            )
        ends = [*store.read(0, min(total, _CORPUS_BATCH)), *store.read(max(0, total - 1), total)]
    digest = hashlib.sha256(json.dumps([[r.key, r.input] for r in ends]).encode()).hexdigest()
    pins = {"corpus": task, "rows": total, "sha256": digest}
    found_rows = partial(_corpus_rows, url, task, total)

    def own() -> Iterator[OwnRow]:
        return ({"input": row.input, "output": row.output} for row in found_rows())

    def unchanged() -> bool:
        return bool(open_corpus(url, task, total).pins == pins)

    def asked() -> Iterator[Row]:
        return (Row(n, row.key, row.input, n + 1) for n, row in enumerate(found_rows()))

    kept = OwnColumns(own, unchanged, _CORPUS) if keep_columns else None
    return Input(pins, total, asked, kept)


def _own_rows(
    files: Sequence[tuple[str, Path]], id_field: str, read: Callable[[Path], Iterator[RawRow]]
) -> Iterator[OwnRow]:
    for _, path in files:
        yield from own_columns(read(path), id_field)


def own_columns(records: Iterable[RawRow], id_field: str) -> Iterator[OwnRow]:
    """Yields the user's own columns of each row."""
    for record in records:
        row = record.kept or (record.value if isinstance(record.value, dict) else {})
        yield {name: row[own] for own, name in beside(row, id_field).items()}


def _schema_of(files: Sequence[Path], id_field: str) -> pa.Schema | None:
    """Returns the types of the user's columns, or None unless all files are Parquet and agree."""
    if any(path.suffix != ".parquet" for path in files):
        return None
    try:
        found = pa.unify_schemas([pq.read_schema(path).remove_metadata() for path in files])
    except pa.ArrowException:
        return None
    return own_schema(found, id_field)


def own_schema(found: pa.Schema, id_field: str) -> pa.Schema:
    """Returns the types of the user's columns in the output."""
    names = beside(found.names, id_field).items()
    fields = ((name, found.field(own).type) for own, name in names)
    return pa.schema(list(fields))  # nullable, because a file may lack the column


def _file_rows(
    files: Sequence[tuple[str, Path]],
    input_field: str,
    id_field: str,
    read: Callable[[Path], Iterator[RawRow]],
) -> Iterator[Row]:
    several = len(files) > 1
    ordinals = count()
    with SeenIds() as seen:
        for number, (name, path) in enumerate(files):
            texts = RowTexts(str(path))
            for record in read(path):
                ordinal = next(ordinals)
                file = name if several else None
                row = row_of(record, ordinal, file, texts, input_field, id_field)
                place = record.line * len(files) + number
                yield row if row.refused else _once(row, seen.first(row.id, place), place, files)


def _once(row: Row, first: int, here: int, files: Sequence[tuple[str, Path]]) -> Row:
    """Returns the row, refused if an earlier row has the same id."""
    if first == here:
        return row
    line, number = divmod(first, len(files))
    where = f"line {line}" if row.file is None else f"line {line} of {files[number][0]}"
    return Row(row.ordinal, row.id, "", row.line, row.file, f"id {row.id!r} is also in {where}")


def row_of(
    record: RawRow, ordinal: int, file: str | None, texts: RowTexts, input_field: str, id_field: str
) -> Row:
    """Returns the row, with its own id if it has one, and refused if it has no input."""
    row_id = str(record.line) if file is None else f"{file}:{record.line}"
    payload, refused = "", None
    value = record.value if isinstance(record.value, dict) else {}
    try:
        if (own := texts.id(value, id_field)) is not None:
            row_id = own
        payload = texts.input(record.fields, input_field)
        if not is_unicode(f"{row_id}{payload}"):
            raise ValueError("the row has a lone surrogate, which is not valid Unicode")
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
                    "run the job again, and do not delete the corpus meanwhile"
                )
            yield from found


class SeenIds:
    """Stores digests of ids, 16 bytes each, and the place where each id first occurred.

    A temporary SQLite file takes about 40 bytes for each id; a cache takes 32 MiB of memory.
    """

    def __enter__(self) -> Self:
        self._open = sqlite3.connect("", isolation_level=None)  # a private temporary file
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._open.execute(f"PRAGMA {pragma}")
        self._open.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, at INTEGER) WITHOUT ROWID")
        self._open.execute("BEGIN")
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def first(self, id_: str, at: int) -> int:
        """Returns the place where an id first occurred; ``at`` if it is new."""
        digest = hashlib.blake2b(id_.encode(), digest_size=_DIGEST_BYTES).digest()
        if self._open.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (digest, at)).rowcount:
            return at
        found = self._open.execute("SELECT at FROM ids WHERE id = ?", (digest,)).fetchone()
        return int(found[0])


def _is_rows(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES) and not path.name.startswith(".")
