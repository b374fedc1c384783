"""Which ids a job's rows have had so far, in bounded memory. It knows no rows and no files."""

import hashlib
import sqlite3
from types import TracebackType
from typing import Self

_CACHE_KIB = 32 << 10
_DIGEST_BYTES = 16


class SeenIds:
    """Ids by their digests of 16 bytes, with where each was first.

    They lie in a temporary file of SQLite's, about 40 bytes each, of which 32 MiB are in memory.
    """

    def __enter__(self) -> Self:
        self._open = sqlite3.connect("", isolation_level=None)  # no name: temporary, ours alone
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            self._open.execute(f"PRAGMA {pragma}")
        self._open.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, at INTEGER) WITHOUT ROWID")
        self._open.execute("BEGIN")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def first(self, id_: str, at: int) -> int:
        """Where an id was first: ``at``, if it was nowhere yet."""
        digest = hashlib.blake2b(id_.encode(), digest_size=_DIGEST_BYTES).digest()
        if self._open.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (digest, at)).rowcount:
            return at
        found = self._open.execute("SELECT at FROM ids WHERE id = ?", (digest,)).fetchone()
        return int(found[0])
