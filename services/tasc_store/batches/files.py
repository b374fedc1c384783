"""Files in Redis, in pieces that expire: inputs and outputs of batches.

The content of files is not interpreted here.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import redis

from tasc_store import keys
from tasc_store.artifacts import UNSEALED_S, verified_blocks
from tasc_store.client import as_text, translated, url_of
from tasc_store.errors import CorruptArtifact, FileInUse, FilesFull, StoreError, UnknownFile

Item = TypeVar("Item")
_STEP = 200  # ids read by one command


@dataclass(frozen=True)
class Page(Generic[Item]):
    """A part of a list, and whether more items follow."""

    items: tuple[Item, ...]
    has_more: bool


def new_id(prefix: str, now: float | None = None) -> str:
    """Makes an id that cannot be guessed; later ids sort after earlier ones."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    return f"{prefix}-{milliseconds:011x}{secrets.token_hex(8)}"


def read_page(
    client: redis.Redis,
    key: str,
    load: Callable[[Sequence[str]], Sequence[Item | None]],
    *,
    after: str,
    limit: int,
    oldest_first: bool,
    wanted: Callable[[Item], bool],
) -> Page[Item]:
    """Reads the items that follow one id, which need not exist any more.

    Args:
        key: A sorted set of ids, all of one score.
        load: Returns the items of some ids; None for one that does not exist.
        after: The id; empty for the beginning.
    """
    found: list[Item] = []
    while len(found) <= limit:
        ids = _ids(client, key, after, oldest_first)
        if not ids:
            break
        after = ids[-1]
        found += [item for item in load(ids) if item is not None and wanted(item)]
    return Page(tuple(found[:limit]), len(found) > limit)


def _ids(client: redis.Redis, key: str, after: str, oldest_first: bool) -> list[str]:
    if oldest_first:
        low = f"({after}" if after else "-"
        return [as_text(i) for i in client.zrangebylex(key, low, "+", 0, _STEP)]
    high = f"({after}" if after else "+"
    return [as_text(i) for i in client.zrevrangebylex(key, high, "-", 0, _STEP)]


CHUNK_BYTES = 4 * 1024 * 1024

# All keys of the scripts below begin with KEYS[1], which holds the hash tag that they share. Times
# are whole seconds since the epoch and come from the caller.
FILES_LUA = """
local P = KEYS[1]
local function data(part, i) return P .. ':data:' .. part .. ':' .. i end

local function whole(part, chunks)
  for i = 0, chunks - 1 do
    if redis.call('EXISTS', data(part, i)) == 0 then return false end
  end
  return true
end

local function keep(file)
  for i = 0, file.chunks - 1 do redis.call('EXPIREAT', data(file.part, i), file.expires_at) end
  redis.call('SET', P .. ':file:' .. file.id, cjson.encode(file), 'EXAT', file.expires_at)
  redis.call('ZADD', P .. ':files', 0, file.id)
  redis.call('ZADD', P .. ':files:ends', file.expires_at, file.id)
  redis.call('HSET', P .. ':files:sizes', file.id, file.size_bytes)
  redis.call('HSET', P .. ':files:owners', file.id, file.owner or '')
end

local function forget(id)
  redis.call('ZREM', P .. ':files', id)
  redis.call('ZREM', P .. ':files:ends', id)
  redis.call('HDEL', P .. ':files:sizes', id)
  redis.call('HDEL', P .. ':files:owners', id)
end

-- Of one who has files already, where users are told apart: half of everything.
local function room_of(owner, most_files, most_bytes, size)
  if owner == '' then return 1 end
  local count, total = 0, size
  local sizes = redis.call('HGETALL', P .. ':files:sizes')
  for i = 1, #sizes, 2 do
    if redis.call('HGET', P .. ':files:owners', sizes[i]) == owner then
      count = count + 1
      total = total + tonumber(sizes[i + 1])
    end
  end
  if count == 0 then return 1 end
  if count >= most_files / 2 then return -3 end
  if total > most_bytes / 2 then return -4 end
  return 1
end

local function room(now, most_files, most_bytes, size, owner)
  local ended = redis.call('ZRANGEBYSCORE', P .. ':files:ends', '-inf', now)
  for _, id in ipairs(ended) do forget(id) end
  if redis.call('ZCARD', P .. ':files') >= most_files then return -1 end
  local total = size
  for _, one in ipairs(redis.call('HVALS', P .. ':files:sizes')) do
    total = total + tonumber(one)
  end
  if total > most_bytes then return -2 end
  return room_of(owner, most_files, most_bytes, size)
end
"""

# ARGV: now, most files, most bytes, size of the next, its owner.
_ROOM = (
    FILES_LUA
    + """
local now, most_files, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
return room(now, most_files, most_bytes, tonumber(ARGV[4]), ARGV[5])
"""
)

# ARGV: now, most files, most bytes, the file's record. The call may be repeated after Redis has
# done it, if the reply was lost.
KEEP = (
    FILES_LUA
    + """
local file = cjson.decode(ARGV[4])
if redis.call('EXISTS', P .. ':file:' .. file.id) == 1 then return 1 end
local now, most_files, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local free = room(now, most_files, most_bytes, file.size_bytes, file.owner or '')
if free < 0 then return free end
if not whole(file.part, file.chunks) then return 0 end
keep(file)
return 1
"""
)

# ARGV: the file's id.
_DELETE = (
    FILES_LUA
    + """
local record = redis.call('GET', P .. ':file:' .. ARGV[1])
if not record then return 0 end
if redis.call('HEXISTS', P .. ':held', ARGV[1]) == 1 then return -1 end
local file = cjson.decode(record)
for i = 0, file.chunks - 1 do redis.call('UNLINK', data(file.part, i)) end
redis.call('UNLINK', P .. ':file:' .. ARGV[1])
forget(ARGV[1])
return 1
"""
)


@dataclass(frozen=True)
class StoredFile:
    """The record of one file.

    Attributes:
        purpose: Purpose of the upload; ``batch_output`` for files that a batch wrote.
        sha256: SHA-256 of the whole file, hexadecimal.
        chunks: Number of its pieces.
        part: Name under which its pieces are stored.
        created_at: Seconds since the epoch, like ``expires_at``, the time at which it expires.
        owner: Owner of the file; empty if users are not distinguished.
        lines: Number of its lines, including blank ones.
    """

    id: str
    filename: str
    purpose: str
    size_bytes: int
    sha256: str
    chunks: int
    part: str
    created_at: int
    expires_at: int
    owner: str = ""
    lines: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class FileLimits:
    """Maximum number of files, and of their bytes together, for a new file to be accepted.

    Output files of batches count, but are always accepted, so accepted batches may exceed the
    limits. One owner may have half of each limit, and always at least one file.
    """

    max_files: int
    max_bytes: int


class Upload:
    """An upload into the store. Its bytes expire unless they are kept.

    It holds at most one piece in memory. Use it from one thread at a time, except that `abandon`
    may be called while another thread writes.

    Raises:
        StoreError: See `translated`; raised by every method except `abandon`.
    """

    def __init__(self, client: redis.Redis, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.part = secrets.token_hex(16)
        self.size_bytes = self.chunks = 0
        self._client, self._chunk_bytes = client, chunk_bytes
        self._url = url_of(client)
        self._held = bytearray()
        self._digest = hashlib.sha256()
        self._line_ends, self._open_line = 0, False
        self._abandoned = False

    def write(self, data: bytes) -> None:
        self._held += data
        self.size_bytes += len(data)
        self._line_ends += data.count(b"\n")
        self._open_line = not data.endswith(b"\n") if data else self._open_line
        while len(self._held) >= self._chunk_bytes:
            self._put(bytes(self._held[: self._chunk_bytes]))
            del self._held[: self._chunk_bytes]

    def keep(
        self, limits: FileLimits, filename: str, purpose: str, ttl_s: float, owner: str = ""
    ) -> StoredFile:
        """Makes a file of all written bytes.

        Raises:
            ValueError: Nothing was written.
            FilesFull: There is no room for it.
            StoreError: The upload took more than an hour, and its beginning has expired.
        """
        if not self.size_bytes:
            raise ValueError("the file is empty; there is nothing to keep")
        try:
            file = self.end(filename, purpose, ttl_s, owner)
        except StoreError:
            self.abandon()
            raise
        script = self._client.register_script(KEEP)
        with translated(self._url):
            values = (int(time.time()), *_values(limits), file.to_json())
            kept = int(script([keys.SHARED], values))
        if kept < 1:  # else nothing is removed, even if the reply was lost
            self.abandon()
        _require_kept(kept, limits)
        return file

    def end(self, filename: str, purpose: str, ttl_s: float, owner: str = "") -> StoredFile:
        """Writes the rest; returns the record of a file that is not kept yet."""
        if self._held:
            self._put(bytes(self._held))
            self._held.clear()
        now = time.time()
        return StoredFile(
            id=new_id("file", now),
            filename=filename,
            purpose=purpose,
            size_bytes=self.size_bytes,
            sha256=self._digest.hexdigest(),
            chunks=self.chunks,
            part=self.part,
            created_at=int(now),
            expires_at=int(now + ttl_s),
            owner=owner,
            lines=self._line_ends + self._open_line,
        )

    def abandon(self) -> None:
        """Removes the written bytes, if Redis is available; otherwise they expire."""
        self._abandoned = True
        self._held.clear()
        with suppress(redis.RedisError):
            if self.chunks:
                self._client.unlink(*_chunk_keys(self.part, self.chunks))

    def _put(self, block: bytes) -> None:
        self.chunks += 1
        self._digest.update(block)
        with translated(self._url):
            self._client.set(_chunk_key(self.part, self.chunks - 1), block, ex=UNSEALED_S)
        if self._abandoned:  # meanwhile, maybe before Redis had this piece
            self.abandon()


class FileStore:
    """All files. Every method raises `StoreError` (see `translated`) when Redis fails."""

    def __init__(self, client: redis.Redis, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._client, self._chunk_bytes = client, chunk_bytes
        self._url = url_of(client)
        self._room = client.register_script(_ROOM)
        self._delete = client.register_script(_DELETE)

    def begin(self) -> Upload:
        return Upload(self._client, self._chunk_bytes)

    def require_room(self, limits: FileLimits, owner: str = "") -> None:
        """Raises FilesFull if there is no room for another file, even a small one."""
        with translated(self._url):
            found = self._room([keys.SHARED], [int(time.time()), *_values(limits), 1, owner])
        _require_kept(int(found), limits)

    def get(self, id_: str) -> StoredFile:
        """Returns a file's record; raises UnknownFile."""
        (found,) = self._load([id_])
        if found is None:
            raise UnknownFile(f"there is no file {id_[:64]!r}; it was deleted, or has expired")
        return found

    def page(
        self,
        *,
        after: str = "",
        limit: int = 100,
        oldest_first: bool = False,
        wanted: Callable[[StoredFile], bool] = lambda file: True,
    ) -> Page[StoredFile]:
        """Files that follow the one with the id ``after``, which need not exist any more."""
        with translated(self._url):
            return read_page(
                self._client,
                keys.shared_key("files"),
                self._load,
                after=after,
                limit=limit,
                oldest_first=oldest_first,
                wanted=wanted,
            )

    def delete(self, id_: str) -> None:
        """Deletes a file; raises UnknownFile, or FileInUse if an open batch reads it."""
        with translated(self._url):
            done = int(self._delete([keys.SHARED], [id_]))
        if done < 0:
            raise FileInUse(f"file {id_} is read by a batch that has not ended; cancel that first")
        if not done:
            self.get(id_)  # raises UnknownFile

    def head(self, file: StoredFile, count: int) -> bytes:
        """The first bytes of a file, at most its first piece."""
        with translated(self._url):
            found = self._client.getrange(_chunk_key(file.part, 0), 0, count - 1)
        return found if isinstance(found, bytes) else found.encode()

    def blocks(self, file: StoredFile) -> Iterator[bytes]:
        """Yields a file's bytes, piece by piece.

        Raises:
            CorruptArtifact: A piece is missing or, after the last one, the bytes differ from those
                written.
        """
        return verified_blocks(
            self._client,
            _chunk_keys(file.part, file.chunks),
            file.size_bytes,
            file.sha256,
            lambda found: CorruptArtifact(
                f"file {file.id} is damaged or deleted (found {found}); upload it again"
            ),
        )

    def _load(self, ids: Sequence[str]) -> list[StoredFile | None]:
        with translated(self._url):
            found = self._client.mget([keys.shared_key("file", id_) for id_ in ids])
        return [None if text is None else StoredFile(**json.loads(as_text(text))) for text in found]


def _values(limits: FileLimits) -> tuple[int, int]:
    return limits.max_files, limits.max_bytes


def _require_kept(found: int, limits: FileLimits) -> None:
    way_out = "delete some that you need no more, or wait until some expire"
    if found == -1:
        raise FilesFull(f"there are {limits.max_files} files, as many as are kept; {way_out}")
    if found == -2:
        raise FilesFull(f"files would have more than {limits.max_bytes} bytes together; {way_out}")
    if found == -3:
        most = f"the {limits.max_files} files that are kept"
        raise FilesFull(f"this key has half of {most}, and may have no more; {way_out}")
    if found == -4:
        most = f"the {limits.max_bytes} bytes that files may have"
        raise FilesFull(f"the files of this key would have more than half of {most}; {way_out}")
    if not found:
        raise StoreError(f"the upload took more than {UNSEALED_S} s; send it faster, or in parts")


def _chunk_key(part: str, index: int) -> str:
    return keys.shared_key("data", part, index)


def _chunk_keys(part: str, count: int) -> list[str]:
    return [_chunk_key(part, i) for i in range(count)]
