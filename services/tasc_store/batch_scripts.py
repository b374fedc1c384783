"""Lua scripts over files and batches: what must happen as a whole or not at all.

All their keys begin with KEYS[1], which holds the hash tag that they share. Times are whole seconds
since the epoch and come from the caller.
"""

_FILES = """
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
ROOM = (
    _FILES
    + """
local now, most_files, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
return room(now, most_files, most_bytes, tonumber(ARGV[4]), ARGV[5])
"""
)

# ARGV: now, most files, most bytes, the file's record. It may be asked for again where Redis has
# done it and the reply was lost.
KEEP = (
    _FILES
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
DELETE_FILE = (
    _FILES
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

_BATCHES = (
    _FILES
    + """
local function batch(id) return P .. ':batch:' .. id end
local function lease(id) return P .. ':lease:' .. id end

local function close(id, status, now)
  local input = redis.call('HGET', batch(id), 'input_file_id')
  local kept = now + tonumber(redis.call('HGET', batch(id), 'kept_s'))
  redis.call('HSET', batch(id), 'status', status, status .. '_at', now)
  redis.call('ZREM', P .. ':open', id)
  redis.call('UNLINK', lease(id))
  if redis.call('HINCRBY', P .. ':held', input, -1) <= 0 then
    redis.call('HDEL', P .. ':held', input)
  end
  redis.call('EXPIREAT', batch(id), kept)
  redis.call('ZADD', P .. ':batches:ends', kept, id)
end

local function sweep(now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':batches:ends', '-inf', now)) do
    redis.call('ZREM', P .. ':batches', id)
    redis.call('ZREM', P .. ':batches:ends', id)
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. ':open', '-inf', now)) do
    if redis.call('HGET', batch(id), 'status') == 'validating'
      and redis.call('EXISTS', lease(id)) == 0 then close(id, 'expired', now) end
  end
end
"""
)

# ARGV: now. Batches that nobody began in time have expired; those kept long enough are forgotten.
SWEEP = _BATCHES + "sweep(tonumber(ARGV[1]))"

# ARGV: now, most batches, input file's id, the deadline, until when the file must stay, batch's id,
# its owner, its fields.
CREATE = (
    _BATCHES
    + """
local now, id = tonumber(ARGV[1]), ARGV[6]
if redis.call('EXISTS', batch(id)) == 1 then return 1 end
sweep(now)
local record = redis.call('GET', P .. ':file:' .. ARGV[3])
if not record then return 0 end
local most, owner = tonumber(ARGV[2]), ARGV[7]
if redis.call('ZCARD', P .. ':batches') >= most then return -1 end
if owner ~= '' then
  local count = 0
  for _, one in ipairs(redis.call('ZRANGE', P .. ':batches', 0, -1)) do
    if redis.call('HGET', batch(one), 'owner') == owner then count = count + 1 end
  end
  if count >= most / 2 then return -2 end
end
local file = cjson.decode(record)
if file.expires_at < tonumber(ARGV[5]) then
  file.expires_at = tonumber(ARGV[5])
  keep(file)
end
local fields = {}
for i = 8, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', batch(id), unpack(fields))
redis.call('ZADD', P .. ':batches', 0, id)
redis.call('ZADD', P .. ':open', ARGV[4], id)
redis.call('HINCRBY', P .. ':held', ARGV[3], 1)
return 1
"""
)

# ARGV: now, batch's id. One that no worker has begun ends at once.
CANCEL = (
    _BATCHES
    + """
local now, id = tonumber(ARGV[1]), ARGV[2]
local status = redis.call('HGET', batch(id), 'status')
if not status then return 0 end
if status == 'cancelling' or status == 'cancelled' then return 1 end
if status ~= 'validating' and status ~= 'in_progress' then return -1 end
redis.call('HSET', batch(id), 'status', 'cancelling', 'cancelling_at', now)
if status == 'validating' and redis.call('EXISTS', lease(id)) == 0 then
  close(id, 'cancelled', now)
end
return 1
"""
)

# ARGV: now, token, milliseconds of a lease, tasks... (none: any). The next deadline comes first.
TAKE = (
    _BATCHES
    + """
sweep(tonumber(ARGV[1]))
local wanted = {}
for i = 4, #ARGV do wanted[ARGV[i]] = true end
for _, id in ipairs(redis.call('ZRANGE', P .. ':open', 0, -1)) do
  if (#ARGV < 4 or wanted[redis.call('HGET', batch(id), 'model')])
    and redis.call('SET', lease(id), ARGV[2], 'NX', 'PX', ARGV[3]) then
    redis.call('HINCRBY', batch(id), 'attempts', 1)
    return id
  end
end
return false
"""
)

# ARGV: batch's id, token, milliseconds. A lease that ran out while nobody took the batch is
# taken up again: Redis may have been away for longer.
_LEASED = (
    _BATCHES
    + """
local id, token = ARGV[1], ARGV[2]
local holder = redis.call('GET', lease(id))
if holder and holder ~= token or not redis.call('ZSCORE', P .. ':open', id) then return false end
redis.call('SET', lease(id), token, 'PX', ARGV[3])
"""
)

# ARGV: as _LEASED.
RENEW = _LEASED + "return redis.call('HGET', batch(id), 'status')"

# ARGV: as _LEASED, whether it counts as an attempt. The next worker need not wait until the
# lease runs out.
RELEASE = (
    _LEASED
    + """
if ARGV[4] == '0' then redis.call('HINCRBY', batch(id), 'attempts', -1) end
return redis.call('UNLINK', lease(id))
"""
)

# ARGV: as _LEASED, now, status or nothing, total, completed, failed. A cancelled batch keeps
# its status. Where something was done, earlier attempts do not count any more.
TELL = (
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

# ARGV: as _LEASED, now, last status, errors, number of files, then each one's field and
# record, then the batch's counts.
FINISH = (
    _LEASED
    + """
local files, at = {}, 8
for i = 1, tonumber(ARGV[7]) do
  local file = cjson.decode(ARGV[at + 1])
  if not whole(file.part, file.chunks) then return 0 end
  files[ARGV[at]] = file
  at = at + 2
end
for field, file in pairs(files) do
  keep(file)
  redis.call('HSET', batch(id), field, file.id)
end
redis.call('HSET', batch(id), 'errors', ARGV[6],
  'total', ARGV[at], 'completed', ARGV[at + 1], 'failed', ARGV[at + 2])
close(id, ARGV[5], tonumber(ARGV[4]))
return 1
"""
)
