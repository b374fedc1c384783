"""Raw records of a Parquet file, one by one, batch after batch.

A page is in memory as a whole: whoever wrote the file chose its size. It does not know which fields
a row needs.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasc_jobs.errors import FileError
from tasc_jobs.records import SHOWN_CHARACTERS, RawRecord, too_long

DAMAGED = (pa.ArrowException, OSError)
_BATCH_ROWS = 256


def check_parquet(path: Path, columns: Sequence[str]) -> None:
    """Opens the file and looks for the columns.

    Raises:
        FileError: It lacks one.
        ArrowException, OSError: It cannot be opened or is no Parquet.
    """
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
    missing = [column for column in columns if column not in names]
    if missing:
        raise FileError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(names)}: name the one to use"
        )


def read_parquet(path: Path, columns: Sequence[str], max_bytes: int) -> Iterator[RawRecord]:
    """Every row in file order; of the columns those there are. A record's line is its row.

    From the damaged place of a row group on its rows give one record with the reason.

    Raises:
        ArrowException, OSError: It cannot be opened or is no Parquet.
    """
    with pq.ParquetFile(path) as file:
        present = [column for column in columns if column in file.schema_arrow.names]
        before = 0
        for group in range(file.num_row_groups):
            end = before + file.metadata.row_group(group).num_rows
            batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=present)
            yield from _group_records(batches, before, end, max_bytes)
            before = end


def _group_records(
    batches: Iterator[pa.RecordBatch], before: int, end: int, max_bytes: int
) -> Iterator[RawRecord]:
    line = before
    try:
        for batch in batches:
            for at in range(batch.num_rows):
                line += 1
                yield _record(line, {c: batch.column(c)[at] for c in batch.schema.names}, max_bytes)
    except DAMAGED as error:
        yield RawRecord(line + 1, None, "", f"damaged Parquet, lost up to row {end}: {error}")


def _record(line: int, cells: dict[str, Any], max_bytes: int) -> RawRecord:
    value = {}
    for column, cell in cells.items():
        try:
            value[column] = cell.as_py()
        except UnicodeDecodeError as error:
            return RawRecord(
                line, None, "", f"not UTF-8 in column {column!r} at byte {error.start}"
            )
    text = json.dumps(value, ensure_ascii=False, default=str)
    reason = too_long(max_bytes) if len(text.encode()) > max_bytes else ""
    return RawRecord(line, value, text[:SHOWN_CHARACTERS], reason)
