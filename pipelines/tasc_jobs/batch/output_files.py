"""A batch job's output and its file of rejects, out of finished records.

Both appear whole. Whether a file is JSON lines or Parquet its suffix says. It generates nothing.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasc_jobs.batch.work import Record
from tasc_runtime.rows import row_writer

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


def write_files(output: Path, reject: Path, records: Iterable[Record], whole: bool) -> None:
    """Write the output, if these are all records, and the rejects, if there are any.

    Raises:
        OSError: The disk fails.
    """
    rejected = 0
    with ExitStack() as stack:
        answers = stack.enter_context(row_writer(output, COLUMNS)) if whole else None
        refusals = stack.enter_context(row_writer(reject))
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
