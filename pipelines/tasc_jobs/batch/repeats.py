"""Rows that repeat an earlier row of a job; they get a copy of its content and need no engine."""

import hashlib
import json
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from tasc_jobs.batch.work import Record, Row

_ENTRY_BYTES = 256  # memory of an entry of the ordered dictionary, its digest included


class Repeats:
    """Copies the content of a row to later rows with an equal payload.

    A row whose payload an engine is answering waits for that answer. Contents of answered rows are
    kept as JSON by digests of their payloads. The least recently used ones are dropped if they
    need more than ``max_bytes``; a later row with such a payload is decoded again.

    Args:
        max_bytes: Maximum memory of kept contents; with 0, no row is a repeat.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept = OrderedDict[bytes, bytes]()
        self._waiting = dict[bytes, list[Row]]()  # an entry for each payload that was sent
        self._copies = list[Record]()

    def add(self, row: Row) -> bool:
        """Returns whether the row waits or is copied; otherwise it must be sent to an engine."""
        if not self._max_bytes:
            return False
        digest = _digest(row)
        if kept := self._kept.get(digest):
            self._kept.move_to_end(digest)
            self._copies.append(_copy(row, json.loads(kept)))
        elif (waiting := self._waiting.get(digest)) is not None:
            waiting.append(row)
        else:
            self._waiting[digest] = []
            return False
        return True

    def finish(self, row: Row, record: Record) -> list[Row]:
        """Copy the content of a row that was sent to the rows that wait for it, and keep it.

        Returns:
            The waiting rows, if the row has no content; they must be sent to an engine themselves.
        """
        if not self._max_bytes:
            return []
        digest = _digest(row)
        waiting = self._waiting.pop(digest, [])
        if record.content is None:
            return waiting
        self._copies += [_copy(each, record.content) for each in waiting]
        self._keep(digest, json.dumps(record.content).encode())
        return []

    def copies(self) -> list[Record]:
        """Returns the records of repeats since the last call."""
        copies, self._copies = self._copies, []
        return copies

    def _keep(self, digest: bytes, content: bytes) -> None:
        if digest not in self._kept:
            self._kept[digest] = content
            self._bytes += len(content) + _ENTRY_BYTES
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1]) + _ENTRY_BYTES


def _copy(row: Row, content: dict[str, Any]) -> Record:
    return replace(Record.of(row, content, None), repeat=True)


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(row.payload.encode(errors="surrogatepass"), digest_size=16).digest()
