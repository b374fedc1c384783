"""What Redis does at once with the records and the pointer of draft indexes, in Lua."""

# KEYS: records, chunks... ; makes the chunks permanent and writes the record, or neither.
SEAL = """
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
end
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""

# KEYS: records, pointer, fingerprints; ARGV: version, fingerprint, channel, and if given what must
# be the current version, 0 for none.
ANNOUNCE = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if ARGV[4] and (redis.call('GET', KEYS[2]) or '0') ~= ARGV[4] then return -1 end
redis.call('SET', KEYS[2], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
"""

# KEYS: records, pointer, rolled back; ARGV: from, to, channel. Below 0: nothing was done.
ROLL_BACK = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return -1 end
if redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 1 then return -2 end
if redis.call('HEXISTS', KEYS[1], ARGV[2]) == 0 then return -3 end
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PUBLISH', ARGV[3], ARGV[2])
return 1
"""

# One script, so that the pointer cannot move between the two reads.
CURRENT = """
local version = redis.call('GET', KEYS[2])
if not version then return false end
return {version, redis.call('HGET', KEYS[1], version) or ''}
"""

# KEYS: records, pointer, chunks...
DELETE = """
if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""
