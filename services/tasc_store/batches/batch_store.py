"""Batches in Redis: their requests, their progress, and their results.

This module does not interpret the content of lines. A worker's operations are in `leases`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, get_args

import msgspec
import redis

from tasc_store import keys
from tasc_store.batches.files import HELD, RECORDS, Page, new_id
from tasc_store.client import as_text, translated, url_of
from tasc_store.errors import BatchEnded, BatchesFull, LinesFull, UnknownBatch, UnknownFile

_EndedStatus = Literal["completed", "failed", "expired", "cancelled"]
Status = Literal["validating", "in_progress", "finalizing", "cancelling", _EndedStatus]
ENDED: Final = frozenset(get_args(_EndedStatus))
TIMES: Final = get_args(Status)[1:]  # a batch stores the time of each of these statuses
_COUNTS: Final = ("total", "completed", "failed", "attempts")
# A worker may begin shortly before the deadline, and must still be able to read the input.
_AFTER_DEADLINE_S: Final = 3600
_READ_AT_ONCE: Final = 200  # batches per read of a list

# A started batch that is cancelled or past its deadline ends without its answers if no worker takes
# it within this time.
LEFT_S = 300

# All keys begin with KEYS[1], which contains their common hash tag. Times are whole seconds since
# the epoch and come from the caller.
BATCHES_LUA = (
    f"local LEFT_S, FILES, HELD = {LEFT_S}, '{RECORDS}', '{HELD}'"
    + """
local P = KEYS[1]
local function batch(id) return P .. ':batch:' .. id end
local function lease(id) return P .. ':lease:' .. id end

local function close(id, status, now)
  local input = redis.call('HGET', batch(id), 'input_file_id')
  local kept = now + tonumber(redis.call('HGET', batch(id), 'kept_s'))
  redis.call('HSET', batch(id), 'status', status, status .. '_at', now)
  redis.call('ZREM', P .. ':open', id)
  redis.call('UNLINK', lease(id))
  if redis.call('HINCRBY', HELD, input, -1) <= 0 then redis.call('HDEL', HELD, input) end
  redis.call('EXPIREAT', batch(id), kept)
  redis.call('ZADD', P .. ':batches:ends', kept, id)
end

-- A started batch is left to workers for LEFT_S, so that they can write its answers so far.
local function overdue(id, now)
  local status = redis.call('HGET', batch(id), 'status')
  local due = tonumber(redis.call('ZSCORE', P .. ':open', id))
  if status ~= 'validating' and now < due + LEFT_S then return end
  close(id, status == 'cancelling' and 'cancelled' or 'expired', now)
end

local function sweep(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':batches:ends', '-inf', now)) do
    redis.call('ZREM', P .. ':batches', id)
    redis.call('ZREM', P .. ':batches:ends', id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':open', '-inf', now)) do
    if redis.call('EXISTS', lease(id)) == 0 then overdue(id, now) end
  end
end
"""
)

# ARGV: now. Batches that no worker holds at their deadline expire. Batches that were kept long
# enough are removed.
_SWEEP = BATCHES_LUA + "sweep(tonumber(ARGV[1]))"

# ARGV: now, maximum number of batches, maximum lines of an owner's unfinished batches or -1, id of
# the input file, deadline, time until which the file must be kept; id, owner, fields of the batch.
_CREATE = (
    BATCHES_LUA
    + """
local function lines_of(owner)
  local total = 0
  for _, one in ipairs(redis.call('ZRANGE', P .. ':open', 0, -1)) do
    local fields = redis.call('HMGET', batch(one), 'owner', 'lines')
    if fields[1] == owner then total = total + tonumber(fields[2] or 0) end
  end
  return total
end

local now, id = tonumber(ARGV[1]), ARGV[7]
if redis.call('EXISTS', batch(id)) == 1 then return 1 end
sweep(now)
local record = redis.call('HGET', FILES, ARGV[4])
local file = record and cjson.decode(record)
if not file or file.expires_at <= now then return 0 end
local max_batches, max_lines, owner = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[8]
if redis.call('ZCARD', P .. ':batches') >= max_batches then return -1 end
if owner ~= '' then
  local count = 0
  for _, one in ipairs(redis.call('ZRANGE', P .. ':batches', 0, -1)) do
    if redis.call('HGET', batch(one), 'owner') == owner then count = count + 1 end
  end
  if count >= max_batches / 2 then return -2 end
end
local lines = file.lines or 0
if max_lines >= 0 and lines_of(owner) + lines > max_lines then return -3 end
if file.expires_at < tonumber(ARGV[6]) then
  file.expires_at = tonumber(ARGV[6])
  redis.call('HSET', FILES, file.id, cjson.encode(file))
end
local fields = {'lines', lines}
for i = 9, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', batch(id), unpack(fields))
redis.call('ZADD', P .. ':batches', 0, id)
redis.call('ZADD', P .. ':open', ARGV[5], id)
redis.call('HINCRBY', HELD, ARGV[4], 1)
return 1
"""
)

# ARGV: now, batch's id. A batch that no worker has started ends at once. Other batches become due.
_CANCEL = (
    BATCHES_LUA
    + """
local now, id = tonumber(ARGV[1]), ARGV[2]
local status = redis.call('HGET', batch(id), 'status')
if not status then return 0 end
if status == 'cancelling' or status == 'cancelled' then return 1 end
if status ~= 'validating' and status ~= 'in_progress' then return -1 end
redis.call('HSET', batch(id), 'status', 'cancelling', 'cancelling_at', now)
if status == 'validating' and redis.call('EXISTS', lease(id)) == 0 then
  close(id, 'cancelled', now)
else
  redis.call('ZADD', P .. ':open', 'XX', 'LT', now, id)
end
return 1
"""
)


@dataclass(frozen=True)
class BatchFault:
    """A reason why a batch failed.

    Attributes:
        line: Line of the input file, from 1.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class NewBatch:
    """A request for a new batch.

    Attributes:
        window: The maximum duration, as the client writes it.
        window_s: The maximum duration in seconds.
        model: The task that all lines name.
        kept_s: How long the record is kept after the batch has ended, in seconds.
        output_ttl_s: How long output files are kept, in seconds.
    """

    input_file_id: str
    endpoint: str
    window: str
    window_s: float
    model: str
    kept_s: int
    output_ttl_s: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True)
class Batch:
    """The current state of a batch.

    Attributes:
        at: Time at which the batch reached each status, in seconds since the epoch.
        total: Number of lines of the input file; 0 until the file has been read.
        attempts: How often a worker has taken the batch since the last progress.
    """

    id: str
    endpoint: str
    input_file_id: str
    window: str
    created_at: int
    expires_at: int
    status: Status
    model: str
    output_ttl_s: int
    metadata: dict[str, str]
    owner: str
    at: dict[str, int]
    total: int = 0
    completed: int = 0
    failed: int = 0
    attempts: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[BatchFault, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class BatchStore:
    """All batches. Every method raises `StoreError` when Redis fails."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._create = client.register_script(_CREATE)
        self._cancel = client.register_script(_CANCEL)
        self._sweep = client.register_script(_SWEEP)

    def create(self, new: NewBatch, max_batches: int, max_lines: int | None = None) -> Batch:
        """Creates a batch. The input file is kept until the batch has ended.

        Args:
            max_lines: Maximum number of lines of the owner's unfinished batches, including this
                one; None: no limit.

        Raises:
            UnknownFile: The input file does not exist.
            BatchesFull: There are ``max_batches`` batches, or half as many of the same owner.
            LinesFull: The owner's unfinished batches would have more lines than ``max_lines``.
        """
        now = time.time()
        id_, deadline = new_id("batch", now), int(now + new.window_s)
        fields = {
            **asdict(new),
            "id": id_,
            "created_at": int(now),
            "expires_at": deadline,
            "status": "validating",
            "metadata": json.dumps(dict(new.metadata), ensure_ascii=False),
            **dict.fromkeys(_COUNTS, 0),
        }
        flat = [part for pair in fields.items() for part in pair]
        stays = deadline + _AFTER_DEADLINE_S
        bounds = (max_batches, -1 if max_lines is None else max_lines)
        values = [int(now), *bounds, new.input_file_id, deadline, stays, id_, new.owner, *flat]
        done = int(self._create([keys.SHARED], values))
        if done == -3:
            raise LinesFull(
                f"the unfinished batches of this API key would exceed {max_lines} lines; wait "
                "until a batch has ended, cancel a batch, or send fewer lines"
            )
        if done == -2:
            raise BatchesFull(
                f"this key has half of the {max_batches} batches that are kept, which is the "
                "limit; wait until its oldest one is removed"
            )
        if done < 0:
            raise BatchesFull(
                f"there are {max_batches} batches, which is the limit; wait until the oldest one "
                "is removed"
            )
        if not done:
            raise UnknownFile(f"there is no file {new.input_file_id[:64]!r}; upload it again")
        return self.get(id_)

    def get(self, id_: str) -> Batch:
        """Returns a batch; raises UnknownBatch if it does not exist."""
        self._swept()
        (found,) = self._load([id_])
        if found is None:
            raise UnknownBatch(f"there is no batch {id_[:64]!r}; ended batches are removed later")
        return found

    def page(
        self,
        *,
        after: str = "",
        limit: int = 20,
        wanted: Callable[[Batch], bool] = lambda batch: True,
    ) -> Page[Batch]:
        """Returns the batches that follow the batch with id ``after``, the newest first."""
        self._swept()
        found: list[Batch] = []
        newest = f"({after}" if after else "+"
        ids = self._client.zrevrangebylex(keys.shared_key("batches"), newest, "-")
        for begin in range(0, len(ids), _READ_AT_ONCE):
            read = self._load([as_text(id_) for id_ in ids[begin : begin + _READ_AT_ONCE]])
            found += (batch for batch in read if batch is not None and wanted(batch))
            if len(found) > limit:
                break
        return Page.of(found, after, limit)

    def cancel(self, id_: str) -> Batch:
        """Ends a batch with the answers so far. Idempotent.

        Raises:
            UnknownBatch: No batch has that id.
            BatchEnded: The batch has already ended, or its answers are being written.
        """
        done = int(self._cancel([keys.SHARED], [int(time.time()), id_]))
        batch = self.get(id_)
        if done < 0:
            raise BatchEnded(f"batch {id_} is {batch.status}; there is nothing to cancel any more")
        return batch

    def _swept(self) -> None:
        self._sweep([keys.SHARED], [int(time.time())])

    def _load(self, ids: Sequence[str]) -> list[Batch | None]:
        with translated(url_of(self._client)):
            pipe = self._client.pipeline(transaction=False)
            for id_ in ids:
                pipe.hgetall(keys.shared_key("batch", id_))
            return [_parsed(found) for found in pipe.execute()]


def _parsed(found: Mapping[bytes | str, bytes | str]) -> Batch | None:
    if not found:
        return None
    values: dict[str, Any] = {as_text(k): as_text(v) for k, v in found.items()}
    values["metadata"] = json.loads(values["metadata"])
    values["errors"] = json.loads(values.get("errors", "[]"))
    values["at"] = {name: values[f"{name}_at"] for name in TIMES if f"{name}_at" in values}
    return msgspec.convert(values, Batch, strict=False)  # numbers are texts in Redis


def errors_json(errors: Sequence[BatchFault]) -> str:
    return json.dumps([asdict(fault) for fault in errors], ensure_ascii=False)
