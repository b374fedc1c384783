"""API keys and first attempts of idempotent requests in a real Redis."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from support import refused
from tasc_store import ApiKey, ApiKeys, IdempotencyStore, UnknownKey
from tasc_store.access import digest_of
from tasc_store.keys import API_KEYS

pytestmark = pytest.mark.redis
LIMITS = {"tasks": ("a", "b"), "requests_per_minute": 60, "tokens_per_minute": 9}


def test_new_key_has_256_random_bits_and_redis_holds_its_hash(client: redis.Redis) -> None:
    keys = ApiKeys(client)
    secret, key = keys.create("backend", **LIMITS)
    assert keys.find(digest_of(secret)) == key
    assert key == ApiKey(key.id, "backend", **LIMITS, created_at=key.created_at)
    for other in (secret[:-1], secret + "a", secret.lower(), secret.removeprefix("tasc_"), ""):
        assert keys.find(digest_of(other)) is None
    held = client.hgetall(API_KEYS)
    assert len(held) == 1
    assert secret.removeprefix("tasc_").encode() not in b"".join([*held, *held.values()])
    made = {ApiKeys(client).create("same")[0] for _ in range(50)}
    assert len(made) == 50
    assert all(secret.startswith("tasc_") and len(secret) == 5 + 43 for secret in made)


def test_revoked_key_stays_known_and_other_keys_stay_valid(client: redis.Redis) -> None:
    keys = ApiKeys(client)
    secret, key = keys.create("gone")
    other, kept = keys.create("kept")
    for id_ in ("", "0" * 16, "*", "[0-9]*", "0" * 15, "F" * 16, "\n"):
        with pytest.raises(UnknownKey):
            keys.revoke(id_)
    assert not any(k.revoked for k in keys.known())
    for _ in range(2):
        assert keys.revoke(key.id).revoked
    assert keys.find(digest_of(secret)).revoked
    assert not keys.find(digest_of(other)).revoked
    assert [(k.name, k.revoked) for k in keys.known()] == [("gone", True), ("kept", False)]
    assert kept.id != key.id


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"tasks": ("a b",)}, "a b"),
        ({"tasks": ("a",) * 1001}, "1001"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"requests_per_minute": True}, "requests_per_minute"),
        ({"tokens_per_minute": 10**10}, "tokens_per_minute"),
    ],
)
def test_invalid_key_is_refused_without_a_write(client, changed, named) -> None:
    with refused(ValueError, named):
        ApiKeys(client).create(**{"name": "good", **changed})
    assert client.keys() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tasks":[]}', '{"tasks":7}', "[" * 10**5])
def test_invalid_record_of_a_key_is_reported(client: redis.Redis, text: str) -> None:
    client.hset(API_KEYS, "f" * 64, text)
    with refused(ValueError, "API key"):
        ApiKeys(client).find("f" * 64)


def test_concurrent_first_attempts_get_the_same_note(client: redis.Redis) -> None:
    attempts = IdempotencyStore(client, ttl_s=60)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: attempts.claim("t", "once", f"note {i}"), range(50)))
    assert len(set(found)) == 1
    assert found[0][1] is None


def test_only_the_first_answer_of_a_claimed_attempt_is_kept_and_it_expires(
    client: redis.Redis,
) -> None:
    attempts = IdempotencyStore(client, ttl_s=60)
    attempts.keep("t", "never claimed", b"answer")
    assert client.keys() == []
    attempts.claim("t", "kept", "note")
    for answer in (b"one", b"two"):
        attempts.keep("t", "kept", answer)
    assert attempts.claim("t", "kept", "other") == ("note", b"one")
    (key,) = client.keys("tasc:{t}:first-attempt:*kept")
    assert 0 < client.ttl(key) <= 60
    assert attempts.claim("other", "kept", "other") == ("other", None)
