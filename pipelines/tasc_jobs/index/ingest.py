"""Appends files of rows to a task's corpus in Redis; refused lines go to a separate file.

Rows are identified by their key, so a second run adds nothing.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import redis

from tasc_draft.files import whole_file
from tasc_runtime.data.rows import BadRow, Fields, check_file, json_line, read_rows
from tasc_runtime.errors import FileError
from tasc_store import CorpusRow, CorpusStore

_BATCH_ROWS = 1000  # the maximum that the store accepts in one call
_BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class IngestReport:
    """The results of an ingest.

    Attributes:
        known: Number of rows with a key that was already in the corpus.
        reject_file: File with the rejected lines.
        first_rejected: File, line and reason of the first rejected line.
        outside_labels: Number of rows whose output is not one of the task's labels.
    """

    added: int
    known: int
    rejected: int
    reject_file: str | None
    first_rejected: str | None = None
    outside_labels: int = 0


def ingest(
    client: redis.Redis,
    task: str,
    files: Sequence[Path],
    fields: Fields = Fields(),
    *,
    reject: Path,
    labels: Collection[str] = (),
    progress: Callable[[int], None] = lambda lines: None,
) -> IngestReport:
    """Append the files' rows to the task's corpus, in order.

    All files are checked before anything is written. After a failure, the rows appended so far
    stay in the corpus, and the ingest can be run again.

    Args:
        client: A connection from `tasc_store.connect`.
        task: The task's name; it need not be registered yet.
        files: ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        fields: Names of the fields or columns. A row without an id gets an id made of the file's
            hash and the line number.
        reject: File for refused lines, as JSON lines ``file, line, reason, text``, with the
            absolute path of the file. Lines that an earlier ingest refused stay in it, unless
            their file is ingested again now. The file exists only if there are refused lines.
        labels: The task's labels, if it has any. Rows with other outputs are added, and counted.
        progress: Called with the number of further lines that are done.

    Raises:
        FileError: There are no files, one cannot be read, or ``reject`` cannot be used, because
            its folder does not exist or it has other content.
        ValueError: The task name is not allowed in a key.
        StoreError: Redis fails.
        OSError: The disk fails during the ingest.
    """
    store = CorpusStore(client, task)
    _check(files, (fields.input, fields.output), reject)
    kept = sum(1 for _ in _others(reject, files))
    found = chain.from_iterable(read_rows(file, fields) for file in files)
    added = known = rejected = outside = 0
    first = None
    with ExitStack() as stack:
        for batch in _batches(found):
            rows = [item for item in batch if isinstance(item, CorpusRow)]
            appended = store.append(rows)
            outside += sum(row.output not in labels for row in rows) if labels else 0
            added, known = added + appended.added, known + appended.known
            for bad in (item for item in batch if isinstance(item, BadRow)):
                if not rejected:
                    first = f"{_printable(bad.file)}, line {bad.line}: {bad.reason}"
                    rejects = stack.enter_context(whole_file(reject))
                    rejects.writelines(_others(reject, files))
                rejects.write(json_line({**asdict(bad), "file": os.path.realpath(bad.file)}))
                rejected += 1
            progress(len(batch))
    if not rejected and kept:
        with whole_file(reject) as rejects:
            rejects.writelines(_others(reject, files))
    elif not rejected:
        reject.unlink(missing_ok=True)
    where = str(reject) if rejected else None
    return IngestReport(added, known, rejected, where, first, outside)


def _others(reject: Path, files: Sequence[Path]) -> Iterator[bytes]:
    """Yields lines that an earlier ingest refused, if their files are not read now."""
    if not reject.exists():
        return
    names = {os.path.realpath(file) for file in files}
    try:
        with reject.open("rb") as lines:
            for line in lines:
                if os.path.realpath(BadRow(**json.loads(line)).file) not in names:
                    yield line
    except (ValueError, TypeError) as error:
        raise FileError(
            f"{reject} would be overwritten, but has lines that `tasc ingest` did not write; name "
            "another file with --reject, or move this file away"
        ) from error


def _printable(file: str) -> str:
    """Returns the name of a file; bytes that are not UTF-8 become escapes."""
    return file.encode(errors="backslashreplace").decode()


def _check(files: Sequence[Path], columns: Sequence[str], reject: Path) -> None:
    if not files:
        raise FileError("no files to ingest; name at least one .jsonl, .jsonl.gz or .parquet file")
    for file in files:
        check_file(file, columns)
        if reject.exists() and reject.samefile(file):
            raise FileError(f"{reject} is an input; name another file with --reject")
    if not reject.parent.is_dir():
        raise FileError(
            f"the folder {reject.parent} for refused rows does not exist; create it, or name "
            "another file with --reject"
        )


def _batches(items: Iterable[CorpusRow | BadRow]) -> Iterator[list[CorpusRow | BadRow]]:
    """Yields lists of bounded length and, because a row may be long, of bounded characters."""
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
