"""Append files of rows to a task's corpus in Redis; refused lines go to a file of their own.

Rows are known by their key, so running it again adds nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import redis

from tasc_runtime.data.rows import (
    BadRow,
    Fields,
    check_file,
    json_line,
    read_rows,
    whole_file,
)
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow, CorpusStore

_BATCH_ROWS = 1000  # the most the store takes in one call
_BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did.

    Attributes:
        known: Rows whose key was there already.
        reject_file: Lists the rejected lines.
        first_rejected: File, line and reason of the first of them.
    """

    added: int
    known: int
    rejected: int
    reject_file: str | None
    first_rejected: str | None = None


def ingest(
    client: redis.Redis,
    task: str,
    files: Sequence[Path],
    fields: Fields = Fields(),
    *,
    reject: Path,
    progress: Callable[[int], None] = lambda lines: None,
) -> IngestReport:
    """Append the files' rows to the task's corpus, in order.

    All files are looked at before anything is written. A failure on the way leaves the rows
    appended so far; run it again.

    Args:
        client: A connection from `tasc_store.connect`.
        task: The task's name; it need not be registered yet.
        files: ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        fields: Names of the fields or columns. A row without an id gets one of
            the file's hash and the line.
        reject: Where refused lines go, as JSON lines ``file, line, reason, text``. Those of files
            that an earlier ingest read stay there; without any line there is no such file.
        progress: Told how many more lines are done.

    Raises:
        FileError: No files, one that cannot be read, or no place for the refused lines: its folder
            is not there, or it has other content.
        ValueError: The task name may not stand in a key.
        StoreError: Redis fails.
        OSError: The disk fails on the way.
    """
    store = CorpusStore(client, task)
    _check(files, (fields.input, fields.output), reject)
    others = _others(reject, files)
    found = chain.from_iterable(read_rows(file, fields) for file in files)
    added = known = rejected = 0
    first = None
    with ExitStack() as stack:
        for batch in _batches(found):
            appended = store.append([item for item in batch if isinstance(item, CorpusRow)])
            added, known = added + appended.added, known + appended.known
            for bad in (item for item in batch if isinstance(item, BadRow)):
                if not rejected:
                    first = f"{_printable(bad.file)}, line {bad.line}: {bad.reason}"
                    rejects = stack.enter_context(whole_file(reject))
                    rejects.writelines(others)
                rejects.write(json_line(asdict(bad)))
                rejected += 1
            progress(len(batch))
    if not rejected and reject.exists():
        with whole_file(reject) as rejects:
            rejects.writelines(others)
        if not others:
            reject.unlink()
    return IngestReport(added, known, rejected, str(reject) if rejected else None, first)


def _others(reject: Path, files: Sequence[Path]) -> list[bytes]:
    """The lines that an earlier ingest refused of files that are not read now."""
    if not reject.exists():
        return []
    names = {str(file) for file in files}
    try:
        lines = reject.read_bytes().splitlines(keepends=True)
        return [line for line in lines if BadRow(**json.loads(line)).file not in names]
    except (ValueError, TypeError) as error:
        raise FileError(
            f"{reject} has other content than lines that `tasc ingest` refused, which would be "
            "lost; name another file with --reject, or move that one away"
        ) from error


def _printable(file: str) -> str:
    """A name that is no UTF-8 has its bytes as escapes."""
    return file.encode(errors="backslashreplace").decode()


def _check(files: Sequence[Path], columns: Sequence[str], reject: Path) -> None:
    if not files:
        raise FileError("no files to ingest; name at least one .jsonl, .jsonl.gz or .parquet")
    for file in files:
        check_file(file, columns)
        if reject.exists() and reject.samefile(file):
            raise FileError(f"{reject} is to be read and to be written; name another for rejects")
    if not reject.parent.is_dir():
        raise FileError(f"no folder {reject.parent} for the refused rows; make it or name another")


def _batches(items: Iterable[CorpusRow | BadRow]) -> Iterator[list[CorpusRow | BadRow]]:
    """Lists bounded in length and, since a row may be long, in characters."""
    batch: list[CorpusRow | BadRow] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.input) + len(item.output) if isinstance(item, CorpusRow) else 0
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
