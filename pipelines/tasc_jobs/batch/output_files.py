"""A batch job's output and its file of rejects, out of finished records.

Both appear whole. Whether a file is JSON lines or Parquet its suffix says. It generates nothing.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_jobs.batch.folder import rename, settle
from tasc_jobs.batch.work import Record

COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("model", pa.string()),
        ("adapter", pa.string()),
        ("index_version", pa.int64()),
    ]
)
_GROUP_ROWS = 10_000


def write_files(output: Path, reject: Path, records: Iterable[Record], whole: bool) -> None:
    """Write the output, if these are all records, and the rejects, if there are any.

    Raises:
        OSError: The disk fails.
    """
    rejected = 0
    with ExitStack() as stack:
        answers = stack.enter_context(_answers(output)) if whole else None
        refusals = stack.enter_context(_lines(reject))
        for record in records:
            if record.content is None:
                rejected += 1
                refusals(_refusal(record))
            elif answers:
                answers({"id": record.id, **record.content})
    if not rejected:
        reject.unlink()


def _refusal(record: Record) -> dict[str, Any]:
    told = {"line": record.line, "id": record.id, "reason": record.error}
    return told if record.file is None else {"file": record.file, **told}


def _answers(path: Path) -> Any:
    return _parquet(path) if path.suffix == ".parquet" else _lines(path)


@contextmanager
def _settled(path: Path) -> Iterator[IO[bytes]]:
    """A file that is in its place when the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        settle(file.fileno())
    rename(partial, path)


@contextmanager
def _lines(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    with _settled(path) as file:

        def write(row: dict[str, Any]) -> None:
            text = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(text.encode(errors="backslashreplace"))

        yield write


@contextmanager
def _parquet(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    with _settled(path) as file, pq.ParquetWriter(file, COLUMNS) as writer:
        rows: list[dict[str, Any]] = []

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, COLUMNS))
            rows.clear()

        def write(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) == _GROUP_ROWS:
                flush()

        yield write
        if rows:
            flush()
