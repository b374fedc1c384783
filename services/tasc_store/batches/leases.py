"""The queue of batches, as workers use it: a batch is leased, reported on, and ended.

A lease expires unless it is renewed. Only the holder of a lease writes to its batch, so that a
worker that was presumed dead cannot change the batch.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import redis

from tasc_store import keys
from tasc_store.batches.batch_store import (
    BATCHES_LUA,
    Batch,
    BatchFault,
    BatchStore,
    Status,
    errors_json,
)
from tasc_store.batches.files import StoredFile
from tasc_store.client import as_text
from tasc_store.errors import LeaseLost

# ARGV: now. Returns three values for each task with batches that no worker holds: its name, the
# number of these batches, and the time since which the first of them has waited.
_WAITING = (
    BATCHES_LUA
    + """
sweep(tonumber(ARGV[1]))
local count, since, found = {}, {}, {}
for _, id in ipairs(redis.call('ZRANGE', P .. ':open', 0, -1)) do
  if redis.call('EXISTS', lease(id)) == 0 then
    local fields = redis.call('HMGET', batch(id), 'model', 'created_at', 'held_at')
    local task, from = fields[1], tonumber(fields[3] or fields[2])
    count[task] = (count[task] or 0) + 1
    since[task] = math.min(since[task] or from, from)
  end
end
for task, number in pairs(count) do
  found[#found + 1] = task
  found[#found + 1] = tostring(number)
  found[#found + 1] = string.format('%d', since[task])
end
return found
"""
)

# ARGV: now, token, milliseconds of a lease, number of excluded tasks, excluded tasks, tasks to take
# from (none: any). The batch with the next deadline is taken.
_TAKE = (
    BATCHES_LUA
    + """
sweep(tonumber(ARGV[1]))
local left, wanted, first = {}, {}, 5 + ARGV[4]
for i = 5, #ARGV do (i < first and left or wanted)[ARGV[i]] = true end
for _, id in ipairs(redis.call('ZRANGE', P .. ':open', 0, -1)) do
  local task = redis.call('HGET', batch(id), 'model')
  if not left[task] and (#ARGV < first or wanted[task])
    and redis.call('SET', lease(id), ARGV[2], 'NX', 'PX', ARGV[3]) then
    redis.call('HINCRBY', batch(id), 'attempts', 1)
    redis.call('HSET', batch(id), 'held_at', ARGV[1])
    return id
  end
end
return false
"""
)

# The beginning of the scripts below. ARGV: batch's id, token, milliseconds, now. If no other worker
# took the batch, an expired lease is renewed as well, since Redis may have been unavailable.
_LEASED = (
    BATCHES_LUA
    + """
local id, token = ARGV[1], ARGV[2]
local holder = redis.call('GET', lease(id))
if holder and holder ~= token or not redis.call('ZSCORE', P .. ':open', id) then return false end
redis.call('SET', lease(id), token, 'PX', ARGV[3])
redis.call('HSET', batch(id), 'held_at', ARGV[4])
"""
)

# ARGV: as _LEASED.
_RENEW = _LEASED + "return redis.call('HGET', batch(id), 'status')"

# ARGV: as _LEASED, whether this use of the batch counts as an attempt. The next worker need not
# wait until the lease expires.
_RELEASE = (
    _LEASED
    + """
if ARGV[5] == '0' then redis.call('HINCRBY', batch(id), 'attempts', -1) end
return redis.call('UNLINK', lease(id))
"""
)

# ARGV: as _LEASED, status or an empty string, total, completed, failed. A cancelled batch keeps its
# status. If there was progress, earlier attempts no longer count.
_REPORT = (
    _LEASED
    + """
local status = redis.call('HGET', batch(id), 'status')
if ARGV[5] ~= '' and status ~= 'cancelling' and status ~= ARGV[5] then
  redis.call('HSET', batch(id), 'status', ARGV[5], ARGV[5] .. '_at', ARGV[4])
  status = ARGV[5]
end
local before = redis.call('HMGET', batch(id), 'completed', 'failed')
if ARGV[7] + ARGV[8] > before[1] + before[2] then redis.call('HSET', batch(id), 'attempts', 1) end
redis.call('HSET', batch(id), 'total', ARGV[6], 'completed', ARGV[7], 'failed', ARGV[8])
return status
"""
)

# ARGV: as _LEASED, last status, errors, number of files, then the field, id and record of each
# file, then the batch's counts.
_FINISH = (
    _LEASED
    + """
local at = 8
for i = 1, tonumber(ARGV[7]) do
  redis.call('HSET', FILES, ARGV[at + 1], ARGV[at + 2])
  redis.call('HSET', batch(id), ARGV[at], ARGV[at + 1])
  at = at + 3
end
redis.call('HSET', batch(id), 'errors', ARGV[6],
  'total', ARGV[at], 'completed', ARGV[at + 1], 'failed', ARGV[at + 2])
close(id, ARGV[5], tonumber(ARGV[4]))
return 1
"""
)


@dataclass(frozen=True)
class Waiting:
    """Batches of a task that no worker holds, whether or not a worker has started them.

    Attributes:
        oldest_s: Seconds since the longest waiting batch was created, or last held by a worker.
    """

    batches: int
    oldest_s: float


def waiting_batches(client: redis.Redis) -> dict[str, Waiting]:
    """Returns waiting batches by task. Batches that no worker took in time are ended first.

    Raises:
        StoreError: Redis fails.
    """
    now = int(time.time())
    found = [as_text(part) for part in client.register_script(_WAITING)([keys.SHARED], [now])]
    parts = zip(found[::3], found[1::3], found[2::3], strict=True)
    return {
        task: Waiting(int(count), max(0.0, float(now - int(since)))) for task, count, since in parts
    }


@dataclass(frozen=True)
class Counts:
    """Numbers of a batch's lines: all, answered, and in the error file."""

    total: int
    completed: int = 0
    failed: int = 0


class BatchLease:
    """One batch held by one worker, for ``seconds`` after each renewal. Thread-safe.

    Every method raises `StoreError` if Redis fails. Every method except `release` raises LeaseLost
    if another worker holds the batch, or the batch has ended.
    """

    def __init__(self, client: redis.Redis, batch: Batch, token: str, lease_s: float) -> None:
        self.batch = batch
        self._client, self._token, self.seconds = client, token, lease_s
        scripts = (_RENEW, _RELEASE, _REPORT, _FINISH)
        self._renew, self._release, self._report, self._finish = map(
            client.register_script, scripts
        )

    def renew(self) -> str:
        """Renews the lease; returns the batch's status, which a client may have changed."""
        return self._status(self._renew)

    def release(self, failed: bool = False) -> None:
        """Releases the batch unchanged, so that another worker can take it at once.

        Args:
            failed: Whether this use of the batch counts as an attempt.
        """
        self._release([keys.SHARED], [*self._leased, int(failed)])

    def report(self, counts: Counts, status: Status | None = None) -> str:
        """Reports progress and a status; returns the new status. ``cancelling`` is not replaced."""
        numbers = (counts.total, counts.completed, counts.failed)
        return self._status(self._report, status or "", *numbers)

    def finish(
        self,
        status: Status,
        counts: Counts,
        files: Mapping[str, StoredFile],
        errors: Sequence[BatchFault] = (),
    ) -> None:
        """Ends the batch and keeps its files, in one step.

        Args:
            files: Files by the field that names them, ``output_file_id`` and ``error_file_id``.
        """
        values: list[str | int] = [*self._leased, status, errors_json(errors), len(files)]
        for name, file in files.items():
            values += [name, file.id, file.to_json()]
        values += [counts.total, counts.completed, counts.failed]
        if self._finish([keys.SHARED], values) is None:
            raise self._lost()

    @property
    def _leased(self) -> tuple[str, str, int, int]:
        return self.batch.id, self._token, _milliseconds(self.seconds), int(time.time())

    def _status(self, script: redis.commands.core.Script, *arguments: str | int) -> str:
        found = script([keys.SHARED], [*self._leased, *arguments])
        if found is None:
            raise self._lost()
        return as_text(found)

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"the lease of batch {self.batch.id} was not renewed within {self.seconds:g} s, and "
            "another worker holds the batch now, or it has ended; finished lines are not lost"
        )


def take_batch(
    client: redis.Redis, lease_s: float, tasks: Sequence[str] = (), without: Sequence[str] = ()
) -> BatchLease | None:
    """Takes the free batch with the nearest deadline; returns None if no batch is free.

    Args:
        lease_s: Duration of the lease without renewal, in seconds.
        tasks: Tasks whose batches may be taken; empty: any.
        without: Tasks whose batches are not taken.

    Raises:
        StoreError: Redis fails.
    """
    token = secrets.token_hex(16)
    script = client.register_script(_TAKE)
    held = (int(time.time()), token, _milliseconds(lease_s))
    found = script([keys.SHARED], [*held, len(without), *without, *tasks])
    if found is None:
        return None
    return BatchLease(client, BatchStore(client).get(as_text(found)), token, lease_s)


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
