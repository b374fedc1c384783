#!/bin/sh
# Starts redis-server with redis.conf and users.acl of this folder; further arguments go to it.
#   REDIS_PASSWORD=... sh deploy/redis-start.sh [--dir /data]
# An ACL file cannot read the environment, so this script writes the password's SHA-256 into a copy.
# users.acl allows the user `tasc` the commands that the service needs, on keys and channels `tasc:*`,
# but none that empty, list or reconfigure the server. No other user can log in. The user `default` is
# off but has all permissions: Redis 7.0 loads its append-only file with that user's permissions and
# would skip every transaction that the user may not run.
set -eu
: "${REDIS_PASSWORD:?set it; 24 random bytes do: openssl rand -hex 24}"
here=$(dirname "$0")
users=$(mktemp)
hash=$(printf %s "$REDIS_PASSWORD" | sha256sum | cut -d ' ' -f 1)
sed "s/REDIS_PASSWORD_SHA256/$hash/" "$here/users.acl" >"$users"
unset REDIS_PASSWORD
exec redis-server "$here/redis.conf" --aclfile "$users" "$@"
