"""A task's corpus in Redis: rows in the order they came, each key once. It knows no tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from tasc_store import keys
from tasc_store.client import translated, url_of

# One call is one Lua script, and a script keeps every other client of the server waiting.
MAX_BATCH = 1000

# SADD comes first: a full or read-only server refuses the first write, so nothing goes in halfway.
_APPEND = """
local added = 0
for i = 1, #ARGV, 2 do
  if redis.call('SADD', KEYS[1], ARGV[i]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i + 1])
    added = added + 1
  end
end
return added
"""


@dataclass(frozen=True)
class CorpusRow:
    """One example of a task. Equal inputs and outputs under different keys are different rows.

    Raises:
        ValueError: The key is empty, or a string is no Unicode text (a lone surrogate).
    """

    key: str
    input: str
    output: str

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("a corpus row needs a key; use its id, or file hash and line")
        try:
            f"{self.key}{self.input}{self.output}".encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"row {self.key!r} holds a lone surrogate; decode its source with errors='replace'"
            ) from error


@dataclass(frozen=True)
class Appended:
    """What became of a batch: rows that went in, and rows whose key was there already."""

    added: int
    known: int


class CorpusStore:
    """The corpus of one task; it only grows. Any number of writers and readers.

    Every method raises `StoreError` (see `translated`) when Redis fails.
    """

    def __init__(self, client: redis.Redis, task: str) -> None:
        self._client = client
        self._url = url_of(client)
        self._append = client.register_script(_APPEND)
        checked = keys.checked_task(task)
        self._rows = keys.task_key(checked, "corpus", "rows")
        self._keys = keys.task_key(checked, "corpus", "keys")

    def append(self, rows: Sequence[CorpusRow]) -> Appended:
        """Append the rows whose key is new, in this order; all of them or, on an error, none.

        When the server's answer was lost the call is repeated, and its rows count as known.

        Raises:
            ValueError: More than 1000 rows.
        """
        if len(rows) > MAX_BATCH:
            raise ValueError(f"{len(rows)} rows in one call; send at most {MAX_BATCH}")
        arguments = [part for row in rows for part in (row.key, _encoded(row))]
        with translated(self._url):
            added = int(self._append([self._keys, self._rows], arguments)) if rows else 0
        return Appended(added, len(rows) - added)

    def __len__(self) -> int:
        with translated(self._url):
            return int(self._client.llen(self._rows))

    def read(self, start: int, stop: int) -> list[CorpusRow]:
        """Rows at positions ``[start, stop)`` in append order; fewer where the corpus ends.

        Raises:
            ValueError: Not 0 <= start <= stop.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"rows [{start}, {stop}) asked for; need 0 <= start <= stop")
        if start == stop:
            return []
        with translated(self._url):
            found = self._client.lrange(self._rows, start, stop - 1)
        return [CorpusRow(*json.loads(row)) for row in found]


def _encoded(row: CorpusRow) -> str:
    return json.dumps([row.key, row.input, row.output], ensure_ascii=False, separators=(",", ":"))
