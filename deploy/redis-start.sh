#!/bin/sh
# Starts redis-server as redis.conf and users.acl beside this file say; more arguments go to it.
#   REDIS_PASSWORD=... sh deploy/redis-start.sh [--dir /data]
# An ACL file cannot read the environment: the password's SHA-256 is put in here, in a file of the
# server's own. users.acl gives the user `tasc` the commands that the service needs on keys and
# channels `tasc:*`, none that empties, lists or reconfigures the server; nobody else may log in.
# The user `default` is off and yet may everything: Redis 7.0 reads its file back with that user's
# rights, and would leave out every transaction that it may not run.
set -eu
: "${REDIS_PASSWORD:?set it; 24 random bytes do: openssl rand -hex 24}"
here=$(dirname "$0")
users=$(mktemp)
hash=$(printf %s "$REDIS_PASSWORD" | sha256sum | cut -d ' ' -f 1)
sed "s/REDIS_PASSWORD_SHA256/$hash/" "$here/users.acl" >"$users"
unset REDIS_PASSWORD
exec redis-server "$here/redis.conf" --aclfile "$users" "$@"
