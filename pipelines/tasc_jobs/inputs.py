"""Input rows of a batch job, out of files: an ordinal, an id and the task's input for every line.

A line that is no row keeps its place and says why, so that the output has one row for each.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tasc_jobs import json_lines, parquet_rows
from tasc_jobs.errors import FileError
from tasc_jobs.records import Record
from tasc_jobs.rows import MAX_LINE_BYTES, check_file

SCHEMA = pa.schema(
    [
        ("ordinal", pa.int64()),
        ("id", pa.string()),
        ("input", pa.string()),
        ("error", pa.string()),
    ]
)


def read_inputs(path: Path, input_field: str, id_field: str, block_rows: int) -> list[pa.Table]:
    """All rows of a file, in tables of ``block_rows``.

    An id is the row's own, a string or a whole number, else the number of its line.

    Raises:
        FileError: The file cannot be read as what its suffix says, or has no rows.
    """
    check_file(path, (input_field,))
    records = (
        parquet_rows.read_parquet(path, (input_field, id_field), MAX_LINE_BYTES)
        if path.suffix == ".parquet"
        else json_lines.read_json_lines(path, MAX_LINE_BYTES)
    )
    tables = list(_tables(records, input_field, id_field, block_rows))
    if not tables:
        raise FileError(f"{path} has no rows; there is nothing to generate")
    return tables


def _tables(
    records: Iterator[Record], input_field: str, id_field: str, block_rows: int
) -> Iterator[pa.Table]:
    rows: list[dict[str, object]] = []
    for ordinal, record in enumerate(records):
        rows.append({"ordinal": ordinal, **_row(record, input_field, id_field)})
        if len(rows) == block_rows:
            yield pa.Table.from_pylist(rows, SCHEMA)
            rows = []
    if rows:
        yield pa.Table.from_pylist(rows, SCHEMA)


def _row(record: Record, input_field: str, id_field: str) -> dict[str, object]:
    value = record.value if isinstance(record.value, dict) else {}
    found, text = value.get(id_field), value.get(input_field)
    row_id = str(found) if isinstance(found, str | int) else str(record.line)
    error = record.reason or (
        None if isinstance(text, str) else f"line {record.line}: no string field {input_field!r}"
    )
    return {"id": row_id, "input": text if error is None else "", "error": error}
