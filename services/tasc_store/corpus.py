"""A task's rows in Redis: its corpus, and answers that services collected for it.

The corpus only grows. Collected rows are a bounded list on their way into it: each has a number
that is never given again, so that a reader can remove just what it has read.
"""

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
        arguments = []
        for row in rows:
            arguments += [row.key, _encoded(row.key, row.input, row.output)]
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


# One call is one Lua script, and a script keeps every other client of the server waiting.
MOST_ROWS = 500

# The end of a script that took the `gone` oldest rows, of `freed` bytes together.
_GONE = """
if gone > 0 then
  redis.call('HINCRBY', KEYS[2], 'first', gone)
  redis.call('HINCRBY', KEYS[2], 'bytes', -freed)
end
return gone
"""

# KEYS: rows, state (first: number of the oldest row; bytes: of all). ARGV: most rows, most bytes,
# rows... Returns how many rows went to make room. Rows go in before the old ones go, so that a full
# server refuses the call before anything is lost.
_ADD = (
    """
local size = 0
for i = 3, #ARGV do
  redis.call('RPUSH', KEYS[1], ARGV[i])
  size = size + #ARGV[i]
end
local bytes = redis.call('HINCRBY', KEYS[2], 'bytes', size)
local count, gone, freed = redis.call('LLEN', KEYS[1]), 0, 0
while count - gone > tonumber(ARGV[1]) or bytes - freed > tonumber(ARGV[2]) do
  local row = redis.call('LPOP', KEYS[1])
  if not row then break end
  gone, freed = gone + 1, freed + #row
end
"""
    + _GONE
)

_READ = """
return {tonumber(redis.call('HGET', KEYS[2], 'first') or '0'),
        redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)}
"""

# ARGV: number of the first row that stays, most rows to remove. Returns how many went.
_REMOVE = (
    """
local first, gone, freed = tonumber(redis.call('HGET', KEYS[2], 'first') or '0'), 0, 0
while first + gone < tonumber(ARGV[1]) and gone < tonumber(ARGV[2]) do
  local row = redis.call('LPOP', KEYS[1])
  if not row then break end
  gone, freed = gone + 1, freed + #row
end
"""
    + _GONE
)


@dataclass(frozen=True)
class CollectedRow:
    """What a service was asked and what it answered, both in words.

    Raises:
        ValueError: The answer is blank, or a string is no Unicode text (a lone surrogate).
    """

    input: str
    output: str

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise ValueError("a collected row has a blank answer; leave it out")
        try:
            f"{self.input}{self.output}".encode()
        except UnicodeEncodeError as error:
            raise ValueError("a collected row has a lone surrogate; leave it out") from error


@dataclass(frozen=True)
class CollectedBatch:
    """The oldest rows.

    Attributes:
        end: The number behind the last of them, for `CollectedRows.remove`.
    """

    rows: tuple[CollectedRow, ...]
    end: int


class CollectedRows:
    """What was collected of one task. Any number of writers; readers may die at any moment.

    Every method raises `StoreError` (see `translated`) when Redis fails.
    """

    def __init__(self, client: redis.Redis, task: str) -> None:
        self._client, self._url = client, url_of(client)
        checked = keys.checked_task(task)
        self._keys = [keys.task_key(checked, "collected", part) for part in ("rows", "state")]
        self._add, self._read, self._remove = map(client.register_script, (_ADD, _READ, _REMOVE))

    def add(self, rows: Sequence[CollectedRow], *, max_rows: int, max_bytes: int) -> int:
        """Add rows, and let the oldest go where there are more than may be; how many went.

        When the server's answer was lost the call is repeated, and rows may be there twice.

        Raises:
            ValueError: More than 500 rows.
        """
        if len(rows) > MOST_ROWS:
            raise ValueError(f"{len(rows)} rows in one call; send at most {MOST_ROWS}")
        if not rows:
            return 0
        with translated(self._url):
            encoded = [_encoded(row.input, row.output) for row in rows]
            return int(self._add(self._keys, [max_rows, max_bytes, *encoded]))

    def read(self, most: int = MOST_ROWS) -> CollectedBatch:
        """The oldest rows; they stay."""
        with translated(self._url):
            first, found = self._read(self._keys, [most])
        return CollectedBatch(
            tuple(CollectedRow(*json.loads(row)) for row in found), first + len(found)
        )

    def remove(self, end: int) -> int:
        """Remove the rows with numbers below ``end``; how many there still were."""
        gone = removed = 0
        with translated(self._url):
            while gone := int(self._remove(self._keys, [end, MOST_ROWS])):
                removed += gone
        return removed

    def __len__(self) -> int:
        with translated(self._url):
            return int(self._client.llen(self._keys[0]))


def _encoded(*fields: str) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
