"""Rows that repeat an earlier row of a job; they get a copy of its content and need no engine."""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from tasc_jobs.batch.work import Record, Row

log = logging.getLogger(__name__)

_ENTRY_BYTES = 256  # memory of an entry of the ordered dictionary, its digest included


class KnownContents:
    """Contents of answered rows as JSON, by digests of the rows' payloads.

    The least recently used ones are dropped if all need more than ``max_bytes``.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept = OrderedDict[bytes, bytes]()

    def find(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns those that are kept, and marks them as used."""
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

    def take(self) -> dict[bytes, bytes]:
        """Returns and removes all."""
        taken, self._kept, self._bytes = dict(self._kept), OrderedDict(), 0
        return taken

    def exchange(
        self, contents: Mapping[bytes, bytes], digests: Sequence[bytes]
    ) -> dict[bytes, bytes]:
        """Adds contents of an engine, and returns those that it asks for."""
        self.add(contents)
        return self.find(digests)


class Repeats:
    """Copies the content of a row to later rows with an equal payload.

    A row whose payload an engine is answering waits for that answer. A row whose content was
    dropped is decoded again.

    Args:
        max_bytes: Maximum memory of kept contents; with 0, no row is a repeat.
        shared: An actor of `KnownContents`, by which the engines of a job `exchange` theirs. None
            keeps contents in this process only.
    """

    def __init__(self, max_bytes: int = 0, shared: Any = None) -> None:
        self._max_bytes, self._shared = max_bytes, shared
        self._kept, self._new = KnownContents(max_bytes), KnownContents(max_bytes)
        self._waiting = dict[bytes, list[Row]]()  # an entry for each payload that was sent
        self._copies = list[Record]()
        self._call: Any = None

    def exchange(self, rows: Sequence[Row]) -> None:
        """Give new contents to the other engines, and ask them for those of rows that come soon.

        The call does not wait. A later call takes what the other engines have answered. If the
        shared actor dies, the engines decode such rows themselves.
        """
        if self._shared is None:
            return
        try:
            if self._call is not None:
                if not ray.wait([self._call], timeout=0)[0]:
                    return
                self._kept.add(ray.get(self._call))
            digests = list({_digest(row) for row in rows})
            known = self._kept.find(digests)  # marked as used, so that no new ones replace them
            unknown = [digest for digest in digests if digest not in known]
            self._call = self._shared.exchange.remote(self._new.take(), unknown)
        except RayError as error:
            log.warning("answers are no longer copied between engines: %s", error)
            self._shared = None

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
            self._new.add(new)
        return []

    def copies(self) -> list[Record]:
        """Returns the records of repeats since the last call."""
        copies, self._copies = self._copies, []
        return copies


def _copy(row: Row, content: dict[str, Any]) -> Record:
    return replace(Record.of(row, content, None), repeat=True)


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(row.payload.encode(errors="surrogatepass"), digest_size=16).digest()
