"""Answers of a batch job on their way to its files: one entry a row, written once.

The job moves entries to its files in order and removes them behind itself, so that few are here at
any time. Whoever comes late, an engine of a killed job, writes nothing below what was moved. It
does not know what an entry says.
"""

from collections.abc import Sequence

import redis

from tasc_store import keys
from tasc_store.client import translated, url_of

MAX_BATCH = 1000  # entries of one call: a script keeps every other client of the server waiting
KEPT_S = 7 * 24 * 3600  # behind the last write; a job that is resumed later answers these rows anew

# KEYS: results, moved; ARGV: seconds, then rows and entries.
_PUT = """
local moved = tonumber(redis.call('GET', KEYS[2]) or '0')
local added = 0
for i = 2, #ARGV, 2 do
  if tonumber(ARGV[i]) >= moved then
    added = added + redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return added
"""

# KEYS: results, moved; ARGV: seconds, first row, row behind the last. A full server refuses a SET,
# but not behind a write of the same script that makes room.
_MOVED = """
for row = tonumber(ARGV[2]), tonumber(ARGV[3]) - 1 do redis.call('HDEL', KEYS[1], row) end
if tonumber(redis.call('GET', KEYS[2]) or '0') < tonumber(ARGV[3]) then
  redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[1])
end
"""

# KEYS: moved; ARGV: seconds, first row. The same holds of its SET.
_RESUME = """
redis.call('DEL', KEYS[1])
if tonumber(ARGV[2]) > 0 then redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[1]) end
"""


class JobResults:
    """The entries of one job of a task, by the number of their row from 0.

    Every method raises `StoreError` (see `translated`) when Redis fails.

    Args:
        job: Unique among the jobs of the task; letters, digits, ``.``, ``_`` and ``-``.

    Raises:
        ValueError: A name may not stand in a key.
    """

    def __init__(self, client: redis.Redis, task: str, job: str) -> None:
        self._client = client
        self._url = url_of(client)
        self._put = client.register_script(_PUT)
        self._moved_script = client.register_script(_MOVED)
        self._resume = client.register_script(_RESUME)
        checked = keys.checked_task(task)
        self._results = keys.task_key(checked, "job", keys.checked_task(job), "results")
        self._moved = keys.task_key(checked, "job", job, "moved")

    def put(self, entries: Sequence[tuple[int, str]]) -> int:
        """Write the entries of rows that have none and were not moved; how many these are."""
        added = 0
        for first in range(0, len(entries), MAX_BATCH):
            parts = [part for entry in entries[first : first + MAX_BATCH] for part in entry]
            with translated(self._url):
                added += int(self._put([self._results, self._moved], [KEPT_S, *parts]))
        return added

    def get(self, rows: Sequence[int]) -> list[bytes | str | None]:
        """The entries of rows; None where there is none."""
        found: list[bytes | str | None] = []
        for first in range(0, len(rows), MAX_BATCH):
            part = [str(row) for row in rows[first : first + MAX_BATCH]]
            with translated(self._url):
                found += self._client.hmget(self._results, part)
        return found

    def rows(self) -> set[int]:
        """All rows that have an entry."""
        with translated(self._url):
            return {int(row) for row in self._client.hkeys(self._results)}

    def __len__(self) -> int:
        with translated(self._url):
            return int(self._client.hlen(self._results))

    def moved(self, first: int, stop: int) -> None:
        """Rows below ``stop`` are in files now; forget the entries of ``[first, stop)``."""
        for start in range(first, stop, MAX_BATCH):
            with translated(self._url):
                end = min(start + MAX_BATCH, stop)
                self._moved_script([self._results, self._moved], [KEPT_S, start, end])

    def resume_at(self, first: int) -> None:
        """The files hold the rows below ``first``, fewer or more than were said to be moved."""
        with translated(self._url):
            self._resume([self._moved], [KEPT_S, first])

    def clear(self) -> None:
        """Forget the job."""
        with translated(self._url):
            self._client.unlink(self._results, self._moved)
