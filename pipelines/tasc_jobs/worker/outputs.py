"""The two files that a batch ends with: answers, and errors. Each line of its input is in one."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tasc_jobs.batch.work import Record, Row
from tasc_jobs.worker.answers import line_id
from tasc_jobs.worker.lines import told
from tasc_runtime.rows import json_line
from tasc_store.batches.batch_store import Batch
from tasc_store.batches.files import FileStore, StoredFile, Upload
from tasc_store.batches.leases import Counts

PURPOSE: Final = "batch_output"
_ENDED: Final = {
    "failed": ("batch_failed", "the batch failed before this request was answered; see its errors"),
    "expired": ("batch_expired", "this request was not answered before the batch's deadline"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class Outputs:
    """Files on their way into the store; nothing of them is kept until the batch ends.

    Every method raises `StoreError` (see `translated`) when Redis fails.
    """

    def __init__(self, files: FileStore, batch: Batch) -> None:
        self._files, self._batch = files, batch
        self._uploads: dict[str, Upload] = {}
        self._lines = {"output": 0, "error": 0}
        self._unanswered = 0

    def write(self, rows: Iterable[Row], records: Iterable[Record], ended: str) -> None:
        """All lines in the order of the input.

        Args:
            records: In the same order; rows may be missing if the batch has not been completed.
            ended: The batch's last status.
        """
        found = iter(records)
        record = next(found, None)
        for row in rows:
            if record and record.ordinal == row.ordinal:
                self._add(record)
                record = next(found, None)
            else:
                self._add_unanswered(row, ended)
        assert record is None, f"record {record.ordinal} has no row"

    @property
    def counts(self) -> Counts:
        answered, failed = self._lines["output"], self._lines["error"]
        return Counts(answered + failed, answered, failed - self._unanswered)

    def end(self) -> Mapping[str, StoredFile]:
        """The files' records by the batch's fields; there is none of a file without lines."""
        return {
            f"{kind}_file_id": upload.end(
                f"{self._batch.id}_{kind}.jsonl",
                PURPOSE,
                self._batch.output_ttl_s,
                self._batch.owner,
            )
            for kind, upload in self._uploads.items()
        }

    def abandon(self) -> None:
        for upload in self._uploads.values():
            upload.abandon()

    def _add(self, record: Record) -> None:
        name = f"batch_req_{line_id(self._batch.id, record.ordinal)}"
        said: dict[str, Any] = {"status_code": 200, "body": record.content}
        if record.error is not None:
            said = told(record.error)
        answer = {"status_code": said["status_code"], "request_id": name, "body": said["body"]}
        self._put(
            "output" if record.error is None else "error",
            {"id": name, "custom_id": record.id, "response": answer, "error": None},
        )

    def _add_unanswered(self, row: Row, ended: str) -> None:
        code, message = _ENDED[ended]
        self._unanswered += 1
        name = f"batch_req_{line_id(self._batch.id, row.ordinal)}"
        error = {"code": code, "message": message}
        self._put("error", {"id": name, "custom_id": row.id, "response": None, "error": error})

    def _put(self, kind: str, content: dict[str, Any]) -> None:
        self._lines[kind] += 1
        if kind not in self._uploads:
            self._uploads[kind] = self._files.begin()
        self._uploads[kind].write(json_line(content))
