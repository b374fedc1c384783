"""Rows that repeat an earlier row of a job; they get a copy of its content and need no engine."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from tasc_jobs.batch.work import Record, Row

_ENTRY_BYTES = 256  # memory of an entry of the ordered dictionary, its digest included
_FIND_S = 10.0


class Contents:
    """Contents of answered rows as JSON, by digests of the rows' payloads.

    The least recently used ones are dropped if all need more than ``max_bytes``.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept = OrderedDict[bytes, bytes]()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def find(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns the contents that are kept."""
        found = {digest: kept for digest in digests if (kept := self._kept.get(digest))}
        for digest in found:
            self._kept.move_to_end(digest)
        return found

    def add(self, contents: Mapping[bytes, bytes]) -> None:
        for digest, content in contents.items():
            if digest not in self._kept:
                self._kept[digest] = content
                self._bytes += len(content) + _ENTRY_BYTES
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._kept.popitem(last=False)[1]) + _ENTRY_BYTES


class Repeats:
    """Copies the content of a row to later rows with an equal payload.

    A row whose payload an engine is answering waits for that answer. A row whose content was
    dropped is decoded again.

    Args:
        max_bytes: Maximum memory of kept contents; with 0, no row is a repeat.
        shared: An actor of `Contents`, to which other engines of the job add theirs. If it dies,
            the engines decode such rows themselves.
    """

    def __init__(self, max_bytes: int = 0, shared: Any = None) -> None:
        self._max_bytes, self._shared = max_bytes, shared
        self._kept, self._new = Contents(max_bytes), dict[bytes, bytes]()
        self._waiting = dict[bytes, list[Row]]()  # an entry for each payload that was sent
        self._copies = list[Record]()

    def fetch(self, rows: Sequence[Row]) -> None:
        """Take contents of rows, which are added next, from the other engines."""
        if self._shared is None:
            return
        digests = {_digest(row) for row in rows if not row.refused}
        unknown = [each for each in digests if each not in self._kept]
        try:
            self._kept.add(ray.get(self._shared.find.remote(unknown), timeout=_FIND_S))
        except RayError:  # its node died, or it does not answer
            self._shared = None

    def share(self) -> None:
        """Give the contents since the last call to the other engines."""
        if self._shared is not None and self._new:
            self._shared.add.remote(self._new)
            self._new = {}

    def add(self, row: Row) -> bool:
        """Returns whether the row waits or is copied; otherwise it must be sent to an engine."""
        if not self._max_bytes:
            return False
        digest = _digest(row)
        if kept := self._kept.find([digest]):
            self._copies.append(_copy(row, json.loads(kept[digest])))
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
        new = {digest: json.dumps(record.content).encode()}
        self._kept.add(new)
        if self._shared is not None:
            self._new |= new
        return []

    def copies(self) -> list[Record]:
        """Returns the records of repeats since the last call."""
        copies, self._copies = self._copies, []
        return copies


def _copy(row: Row, content: dict[str, Any]) -> Record:
    return replace(Record.of(row, content, None), repeat=True)


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(row.payload.encode(errors="surrogatepass"), digest_size=16).digest()
