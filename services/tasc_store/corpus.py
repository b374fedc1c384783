"""A task's rows in Redis: its corpus, and the answers that services collect for it.

The corpus is append-only. Collected rows are a bounded queue of candidates for the corpus. Each
collected row has a unique number, so that a reader can remove exactly the rows it has read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from tasc_store import keys
from tasc_text import is_unicode

# Maximum rows of one call. A call is one Lua script, during which all other clients wait.
MAX_BATCH = 1000

# SADD comes first: a full or read-only server refuses this write, so no row is half written.
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
        ValueError: The key is empty, or a string has a lone surrogate.
    """

    key: str
    input: str
    output: str

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("a corpus row needs a key; use its id, or file hash and line")
        if not is_unicode(f"{self.key}{self.input}{self.output}"):
            raise ValueError(
                f"row {self.key!r} has a lone surrogate; decode its source with errors='replace'"
            )


@dataclass(frozen=True)
class Appended:
    """The result of an append: rows that were added, and rows whose key already existed."""

    added: int
    known: int


class CorpusStore:
    """The append-only corpus of one task, for any number of concurrent writers and readers.

    Every method raises `StoreError` if Redis fails.
    """

    def __init__(self, client: redis.Redis, task: str) -> None:
        self._client = client
        self._append = client.register_script(_APPEND)
        checked = keys.checked_task(task)
        self._rows = keys.task_key(checked, "corpus", "rows")
        self._keys = keys.task_key(checked, "corpus", "keys")

    def append(self, rows: Sequence[CorpusRow]) -> Appended:
        """Appends the rows whose key is new, in the given order. On an error, no row is appended.

        If the server's reply is lost, the call is repeated, and rows that the first call added
        count as known.

        Raises:
            ValueError: More than 1000 rows.
        """
        if len(rows) > MAX_BATCH:
            raise ValueError(f"{len(rows)} rows in one call; the maximum is {MAX_BATCH}")
        arguments = []
        for row in rows:
            arguments += [row.key, _encoded(row.key, row.input, row.output)]
        added = int(self._append([self._keys, self._rows], arguments)) if rows else 0
        return Appended(added, len(rows) - added)

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._client.llen(self._rows))

    def read(self, start: int, stop: int) -> list[CorpusRow]:
        """Returns the rows at positions ``[start, stop)`` in append order.

        Returns fewer rows if the corpus ends before ``stop``.

        Raises:
            ValueError: ``0 <= start <= stop`` does not hold.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"the range is [{start}, {stop}); it must satisfy 0 <= start <= stop")
        if start == stop:
            return []
        rows = self._client.lrange(self._rows, start, stop - 1)
        return [CorpusRow(*json.loads(row)) for row in rows]


# Maximum collected rows of one call. Collected rows may be longer than corpus rows.
MAX_COLLECTED = 500

# The end of a script that removed the `removed` oldest rows, with `freed` bytes in total.
_COUNT_REMOVED = """
if removed > 0 then
  redis.call('HINCRBY', KEYS[2], 'first', removed)
  redis.call('HINCRBY', KEYS[2], 'bytes', -freed)
end
return removed
"""

# KEYS: rows, state (first: number of the oldest row; bytes: size of all rows). ARGV: maximum rows,
# maximum bytes, rows... Returns how many old rows were removed to stay within the limits. New rows
# are added before old ones are removed, so a full server refuses the call before any row is lost.
_ADD = (
    """
local size = 0
for i = 3, #ARGV do
  redis.call('RPUSH', KEYS[1], ARGV[i])
  size = size + #ARGV[i]
end
local bytes = redis.call('HINCRBY', KEYS[2], 'bytes', size)
local count, removed, freed = redis.call('LLEN', KEYS[1]), 0, 0
while count - removed > tonumber(ARGV[1]) or bytes - freed > tonumber(ARGV[2]) do
  local row = redis.call('LPOP', KEYS[1])
  if not row then break end
  removed, freed = removed + 1, freed + #row
end
"""
    + _COUNT_REMOVED
)

_READ = """
return {tonumber(redis.call('HGET', KEYS[2], 'first') or '0'),
        redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)}
"""

# ARGV: number of the first row to keep, maximum rows to remove. Returns how many rows were removed.
_REMOVE = (
    """
local first, removed, freed = tonumber(redis.call('HGET', KEYS[2], 'first') or '0'), 0, 0
while first + removed < tonumber(ARGV[1]) and removed < tonumber(ARGV[2]) do
  local row = redis.call('LPOP', KEYS[1])
  if not row then break end
  removed, freed = removed + 1, freed + #row
end
"""
    + _COUNT_REMOVED
)


@dataclass(frozen=True)
class CollectedRow:
    """The input of a request to a service and its answer, both as text.

    Raises:
        ValueError: The answer is blank, or a string has a lone surrogate.
    """

    input: str
    output: str

    def __post_init__(self) -> None:
        if not self.output.strip():
            raise ValueError("a collected row has a blank answer; leave it out")
        if not is_unicode(f"{self.input}{self.output}"):
            raise ValueError("a collected row has a lone surrogate; leave it out")


@dataclass(frozen=True)
class CollectedBatch:
    """The oldest collected rows.

    Attributes:
        end: The number that follows the last row's number, for `CollectedRows.remove`.
    """

    rows: tuple[CollectedRow, ...]
    end: int


class CollectedRows:
    """The collected rows of one task, for any number of concurrent writers.

    A reader may die at any moment without losing rows, because reading does not remove rows. Every
    method raises `StoreError` if Redis fails.
    """

    def __init__(self, client: redis.Redis, task: str) -> None:
        self._client = client
        checked = keys.checked_task(task)
        self._keys = [keys.task_key(checked, "collected", part) for part in ("rows", "state")]
        self._add, self._read, self._remove = map(client.register_script, (_ADD, _READ, _REMOVE))

    def add(self, rows: Sequence[CollectedRow], *, max_rows: int, max_bytes: int) -> int:
        """Adds rows, and drops the oldest rows beyond the limits.

        If the server's reply is lost, the call is repeated, which may duplicate rows.

        Returns:
            The number of rows dropped.

        Raises:
            ValueError: More than 500 rows.
        """
        if len(rows) > MAX_COLLECTED:
            raise ValueError(f"{len(rows)} rows in one call; the maximum is {MAX_COLLECTED}")
        if not rows:
            return 0
        encoded = [_encoded(row.input, row.output) for row in rows]
        return int(self._add(self._keys, [max_rows, max_bytes, *encoded]))

    def read(self, limit: int = MAX_COLLECTED) -> CollectedBatch:
        """Returns up to ``limit`` of the oldest rows, without removing them."""
        first, rows = self._read(self._keys, [limit])
        return CollectedBatch(
            tuple(CollectedRow(*json.loads(row)) for row in rows), first + len(rows)
        )

    def remove(self, end: int) -> int:
        """Removes the rows with numbers below ``end``.

        Returns:
            The number of rows removed; another reader may have removed the rest.
        """
        total = 0
        while removed := int(self._remove(self._keys, [end, MAX_COLLECTED])):
            total += removed
        return total

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._client.llen(self._keys[0]))


def _encoded(*fields: str) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
