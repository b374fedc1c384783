from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from tasc_store import FirstTries

pytestmark = pytest.mark.redis


def test_of_many_first_tries_at_once_one_note_stands(client: redis.Redis) -> None:
    tries = FirstTries(client, ttl_s=60)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: tries.claim("t", "once", f"note {i}"), range(50)))
    assert len(set(found)) == 1
    assert found[0][1] is None


def test_the_first_answer_stays_and_is_what_later_tries_find(client: redis.Redis) -> None:
    tries = FirstTries(client, ttl_s=60)
    tries.claim("t", "kept", "note")
    for answer in (b"one", b"two"):
        tries.keep("t", "kept", answer)
    assert tries.claim("t", "kept", "other") == ("note", b"one")
    assert tries.claim("other", "kept", "other") == ("other", None)


def test_all_of_it_is_forgotten_in_time_and_an_answer_without_its_note_is_not_kept(
    client: redis.Redis,
) -> None:
    tries = FirstTries(client, ttl_s=60)
    tries.keep("t", "never claimed", b"answer")
    tries.claim("t", "claimed", "note")
    tries.keep("t", "claimed", b"answer")
    (key,) = client.keys("tasc:{t}:first-try:*claimed")
    assert key.endswith(b"try:claimed")
    assert 0 < client.ttl(key) <= 60
