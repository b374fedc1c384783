"""API keys in Redis, and first attempts of requests with an idempotency key.

An API key is 256 random bits, shown once when it is created; Redis holds its SHA-256. One fast hash
is enough for such a secret, because 2^256 keys cannot be tried. Protection against guessed
passwords (salt, many rounds) would only slow down requests. A key is found by its hash, so
comparison times reveal nothing about a secret.
"""

import hashlib
import json
import re
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

import redis

from tasc_store import keys
from tasc_store.client import as_text, url_of
from tasc_store.errors import UnknownKey

PREFIX: Final = "tasc_"
_SECRET_BYTES = 32
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_ID_LENGTH = 16  # an id is this many of the hash's 64 hexadecimal digits
_ID = re.compile(rf"[0-9a-f]{{{_ID_LENGTH}}}")
_MAX_NAME = 64
_MAX_TASKS = 1000
_HIGHEST_LIMIT = 10**9


@dataclass(frozen=True)
class ApiKey:
    """The record of a key, without the key itself.

    Attributes:
        id: Id of the key in commands, the beginning of its hash.
        name: Display name of the owner: 1 to 64 printable characters.
        tasks: Tasks that the key may use; empty: all.
        requests_per_minute: Maximum number of requests; unset: no limit.
        tokens_per_minute: Maximum number of tokens of answers; unset: no limit.
        created_at: Time of creation, in seconds since the epoch.
        revoked: Whether the key is no longer valid.

    Raises:
        ValueError: A value is of the wrong kind or outside its range.
    """

    id: str
    name: str
    tasks: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    created_at: float = 0.0
    revoked: bool = False

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"{self.id!r} is not the id of a key; `tasc key list` shows the ids")
        if not 1 <= len(self.name) <= _MAX_NAME or not self.name.isprintable():
            raise ValueError(
                f"a key cannot have the name {self.name!r}; use 1 to {_MAX_NAME} printable "
                "characters"
            )
        if len(self.tasks) > _MAX_TASKS:
            raise ValueError(
                f"{len(self.tasks)} tasks are given; give at most {_MAX_TASKS}, or none for all"
            )
        for task in self.tasks:
            keys.checked_task(task)
        _check_limit("requests_per_minute", self.requests_per_minute)
        _check_limit("tokens_per_minute", self.tokens_per_minute)

    def may_use(self, task: str) -> bool:
        return not self.tasks or task in self.tasks

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads a record; raises ValueError or TypeError if it is invalid."""
        content: Any = json.loads(text)
        return cls(**{**content, "tasks": tuple(content["tasks"])})


class ApiKeys:
    """The register of keys. Records are never removed, so that revoked keys stay known.

    Every method raises `StoreError` if Redis fails, and ValueError if a record is invalid.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def create(
        self,
        name: str,
        *,
        tasks: tuple[str, ...] = (),
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> tuple[str, ApiKey]:
        """Creates a key and its record, and returns both. The key cannot be shown again.

        Raises:
            ValueError: See `ApiKey`.
        """
        secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        digest = digest_of(secret)
        limits = (requests_per_minute, tokens_per_minute)
        key = ApiKey(digest[:_ID_LENGTH], name, tuple(tasks), *limits, created_at=time.time())
        self._client.hset(keys.API_KEYS, digest, key.to_json())
        return secret, key

    def find(self, digest: str) -> ApiKey | None:
        """Returns the key with this hash, revoked or not; None if no key has it."""
        found = self._client.hget(keys.API_KEYS, digest)
        return None if found is None else _parsed(found)

    def known(self) -> list[ApiKey]:
        """Every key, oldest first."""
        found = [_parsed(text) for _, text in self._client.hscan_iter(keys.API_KEYS)]
        return sorted(set(found), key=lambda key: (key.created_at, key.id))

    def revoke(self, id: str) -> ApiKey:
        """Revokes a key permanently; services refuse it within their ``auth.cache_ttl_s``.

        Raises:
            UnknownKey: No key has this id.
        """
        if not _ID.fullmatch(id):
            raise UnknownKey(
                f"{id[:_MAX_NAME]!r} is not the id of a key; `tasc key list` shows the ids"
            )
        for digest, text in self._client.hscan_iter(keys.API_KEYS, match=f"{id}*"):
            key = replace(_parsed(text), revoked=True)
            self._client.hset(keys.API_KEYS, as_text(digest), key.to_json())
            return key
        raise UnknownKey(
            f"no key {id} at {url_of(self._client)}; `tasc key list` shows the existing ones"
        )


def is_key(text: str) -> bool:
    """Whether a text has the form of a key."""
    return _SECRET.fullmatch(text) is not None


def digest_of(secret: str) -> str:
    """The SHA-256 of a key in 64 hexadecimal digits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _check_limit(name: str, limit: int | None) -> None:
    if limit is not None and (type(limit) is not int or not 1 <= limit <= _HIGHEST_LIMIT):
        raise ValueError(f"{name} is {limit!r}; use 1 to {_HIGHEST_LIMIT}, or leave it out")


def _parsed(text: str | bytes) -> ApiKey:
    try:
        return ApiKey.from_json(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the record of an API key cannot be read: {error}") from error


# One script, so that only one of two simultaneous attempts is the first.
_CLAIM = """
if redis.call('HSETNX', KEYS[1], 'note', ARGV[1]) == 1 then
  redis.call('EXPIRE', KEYS[1], ARGV[2])
end
return redis.call('HMGET', KEYS[1], 'note', 'answer')
"""

# The note may have expired by now. An answer stored without a note would never expire.
_KEEP = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
return redis.call('HSETNX', KEYS[1], 'answer', ARGV[1])
"""


class IdempotencyStore:
    """Notes and answers of first attempts, forgotten after ``ttl_s`` seconds.

    Every method raises `StoreError` when Redis fails.
    """

    def __init__(self, client: redis.Redis, ttl_s: int) -> None:
        self._ttl_s = ttl_s
        self._claim = client.register_script(_CLAIM)
        self._keep = client.register_script(_KEEP)

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        """Stores a first attempt if none is stored; returns its note, and its answer if known."""
        found, answer = self._claim([_key(task, name)], [note, self._ttl_s])
        return as_text(found), answer

    def keep(self, task: str, name: str, answer: bytes) -> None:
        """Stores the answer of a first attempt; an answer that is already stored is kept."""
        self._keep([_key(task, name)], [answer])


def _key(task: str, name: str) -> str:
    return keys.task_key(task, "first-attempt", name)
