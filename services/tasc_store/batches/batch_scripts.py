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

# A begun batch past its deadline, or cancelled, that no worker takes up within so long ends without
# its answers.
LEFT_S = 300

_BATCHES = (
    _FILES
    + f"local LEFT_S = {LEFT_S}"
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

-- One that was begun is left to workers for a while: they write what is done of it.
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

# ARGV: now. Batches that nobody holds past their deadline have expired; those kept long enough are
# forgotten.
SWEEP = _BATCHES + "sweep(tonumber(ARGV[1]))"

# ARGV: now. Of each task whose batches nobody holds: its name, how many they are, since when the
# first of them is waiting.
WAITING = (
    _BATCHES
    + """
sweep(tonumber(ARGV[1]))
local count, since, found = {}, {}, {}
for _, id in ipairs(redis.call('ZRANGE', P .. ':open', 0, -1)) do
  if redis.call('EXISTS', lease(id)) == 0 then
    local said = redis.call('HMGET', batch(id), 'model', 'created_at', 'held_at')
    local task, from = said[1], tonumber(said[3] or said[2])
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

# ARGV: now, most batches, most lines of an owner's open ones or -1, input file's id, the deadline,
# until when the file must stay, batch's id, its owner, its fields.
CREATE = (
    _BATCHES
    + """
local function lines_of(owner)
  local total = 0
  for _, one in ipairs(redis.call('ZRANGE', P .. ':open', 0, -1)) do
    local said = redis.call('HMGET', batch(one), 'owner', 'lines')
    if said[1] == owner then total = total + tonumber(said[2] or 0) end
  end
  return total
end

local now, id = tonumber(ARGV[1]), ARGV[7]
if redis.call('EXISTS', batch(id)) == 1 then return 1 end
sweep(now)
local record = redis.call('GET', P .. ':file:' .. ARGV[4])
if not record then return 0 end
local most, most_lines, owner = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[8]
if redis.call('ZCARD', P .. ':batches') >= most then return -1 end
if owner ~= '' then
  local count = 0
  for _, one in ipairs(redis.call('ZRANGE', P .. ':batches', 0, -1)) do
    if redis.call('HGET', batch(one), 'owner') == owner then count = count + 1 end
  end
  if count >= most / 2 then return -2 end
end
local file = cjson.decode(record)
local lines = file.lines or 0
if most_lines >= 0 and lines_of(owner) + lines > most_lines then return -3 end
if file.expires_at < tonumber(ARGV[6]) then
  file.expires_at = tonumber(ARGV[6])
  keep(file)
end
local fields = {'lines', lines}
for i = 9, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', batch(id), unpack(fields))
redis.call('ZADD', P .. ':batches', 0, id)
redis.call('ZADD', P .. ':open', ARGV[5], id)
redis.call('HINCRBY', P .. ':held', ARGV[4], 1)
return 1
"""
)

# ARGV: now, batch's id. One that no worker has begun ends at once; another is due from now on.
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
else
  redis.call('ZADD', P .. ':open', 'XX', 'LT', now, id)
end
return 1
"""
)

# ARGV: now, token, milliseconds of a lease, how many tasks to leave, these, tasks to take... (none:
# any). The next deadline comes first.
TAKE = (
    _BATCHES
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

# ARGV: batch's id, token, milliseconds, now. A lease that ran out while nobody took the batch is
# taken up again: Redis may have been away for longer.
_LEASED = (
    _BATCHES
    + """
local id, token = ARGV[1], ARGV[2]
local holder = redis.call('GET', lease(id))
if holder and holder ~= token or not redis.call('ZSCORE', P .. ':open', id) then return false end
redis.call('SET', lease(id), token, 'PX', ARGV[3])
redis.call('HSET', batch(id), 'held_at', ARGV[4])
"""
)

# ARGV: as _LEASED.
RENEW = _LEASED + "return redis.call('HGET', batch(id), 'status')"

# ARGV: as _LEASED, whether it counts as an attempt. The next worker need not wait until the
# lease runs out.
RELEASE = (
    _LEASED
    + """
if ARGV[5] == '0' then redis.call('HINCRBY', batch(id), 'attempts', -1) end
return redis.call('UNLINK', lease(id))
"""
)

# ARGV: as _LEASED, status or nothing, total, completed, failed. A cancelled batch keeps
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

# ARGV: as _LEASED, last status, errors, number of files, then each one's field and
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
