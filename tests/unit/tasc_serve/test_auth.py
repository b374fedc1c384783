"""Tests that keys are cached within bounds, and work while the store is unavailable."""

import asyncio
import threading
from dataclasses import dataclass, field, replace

import pytest

from support import DEADLINE_S, eventually_async
from tasc_serve.access.access_control import KnownKeys
from tasc_serve.http_errors import ApiError
from tasc_serve.settings import AuthSettings, LimitSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import ApiKey, StoreUnreachable
from tasc_store.access import digest_of

pytestmark = pytest.mark.anyio


def secret_of(number: int) -> str:
    return f"tasc_{number:043}"


@dataclass
class Store:
    """Keys by hash; it counts look-ups, and can be unavailable, silent or broken."""

    keys: dict[str, ApiKey] = field(default_factory=dict)
    looked_up: list[str] = field(default_factory=list)
    fails: Exception | None = None
    silent: threading.Event | None = None
    now: float = 0.0

    def add(self, number: int) -> ApiKey:
        key = ApiKey(f"{number:016x}", "a key")
        self.keys[digest_of(secret_of(number))] = key
        return key

    def revoke(self, number: int) -> None:
        digest = digest_of(secret_of(number))
        self.keys[digest] = replace(self.keys[digest], revoked=True)

    def find(self, digest: str) -> ApiKey | None:
        self.looked_up.append(digest)
        if self.silent:
            self.silent.wait(DEADLINE_S)
        if self.fails:
            raise self.fails
        return self.keys.get(digest)

    def known(self, limits: dict[str, float] | None = None, **settings: float) -> KnownKeys:
        calls = StoreCalls.of("API keys", LimitSettings(**(limits or {})))
        return KnownKeys(self.find, AuthSettings(**settings), calls, lambda: self.now)


async def asked(known: KnownKeys, number: int) -> ApiKey | int:
    """Returns the key, or the status of the error."""
    try:
        return await known.of(f"Bearer {secret_of(number)}")
    except ApiError as error:
        return error.status


@pytest.fixture
def store() -> Store:
    return Store()


async def until_asked(known: KnownKeys, number: int, found: ApiKey | int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await asked(known, number) != found:
            await asyncio.sleep(0.01)


async def test_key_is_looked_up_again_only_after_its_cache_time(store: Store):
    key, known = store.add(1), store.known(cache_ttl_s=10)
    for _ in range(5):
        assert await asked(known, 1) == key
        assert await asked(known, 2) == 401
    assert len(store.looked_up) == 2
    store.now = 10
    store.revoke(1)
    new = store.add(2)
    assert [await asked(known, number) for number in (1, 2)] == [401, new]
    assert len(store.looked_up) == 4


async def test_concurrent_requests_share_one_look_up(store: Store):
    key, known = store.add(1), store.known()
    found = await asyncio.gather(*(asked(known, 1) for _ in range(50)))
    assert found == [key] * 50
    assert len(store.looked_up) == 1


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", secret_of(1), f"Token {secret_of(1)}",
     "Bearer none", f"Bearer {secret_of(1)}x", f"Bearer  {secret_of(1)[:-1]}", "Bearer \xe9" * 99],
)  # fmt: skip
async def test_malformed_key_is_refused_without_a_look_up(store: Store, header: str | None):
    store.add(1)
    with pytest.raises(ApiError) as caught:
        await store.known().of(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert secret_of(1) not in caught.value.message
    assert store.looked_up == []


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_authorization_scheme_is_case_insensitive(store: Store, scheme: str):
    key = store.add(1)
    assert await store.known().of(f"{scheme}  {secret_of(1)} ") == key


async def test_known_keys_work_and_unknown_keys_get_503_while_the_store_is_down(store):
    key, known = store.add(1), store.known({"store_pause_s": 0.1}, cache_ttl_s=10)
    assert [await asked(known, 1), await asked(known, 2)] == [key, 401]
    store.now, store.fails = 11, StoreUnreachable("gone")
    for _ in range(9):
        assert [await asked(known, number) for number in (1, 2, 3)] == [key, 503, 503]
    assert len(store.looked_up) < 9, "it is left alone for a moment"
    store.fails = None
    await until_asked(known, 2, 401)
    assert [await asked(known, number) for number in (1, 2, 3)] == [key, 401, 401]


async def test_silent_store_delays_no_known_key(store: Store):
    limits = {"store_timeout_s": 0.05, "store_pause_s": 0.1}
    key, known = store.add(1), store.known(limits, cache_ttl_s=10)
    assert await asked(known, 1) == key
    store.now, store.silent = 11, threading.Event()
    assert await asked(known, 1) == key  # this one waited for the time-out
    for _ in range(5):
        assert [await asked(known, 1), await asked(known, 2)] == [key, 503]
    store.silent.set()
    await until_asked(known, 2, 401)


async def test_unknown_keys_do_not_evict_valid_keys(store: Store):
    key, known = store.add(0), store.known(max_cached_keys=10)
    assert await asked(known, 0) == key
    for number in range(1, 300):
        assert await asked(known, number) == 401
    looked_up = len(store.looked_up)
    assert await asked(known, 299) == 401
    assert len(store.looked_up) == looked_up, "the last of them is remembered"
    assert await asked(known, 1) == 401
    assert len(store.looked_up) == looked_up + 1, "the first of them is not"
    store.fails = StoreUnreachable("gone")
    assert await asked(known, 0) == key


async def test_cancelled_request_does_not_cancel_the_shared_look_up(store: Store):
    store.silent = threading.Event()
    key, known = store.add(1), store.known()
    first, second = (asyncio.create_task(asked(known, 1)) for _ in range(2))
    await eventually_async(lambda: len(store.looked_up) == 1)
    first.cancel()
    store.silent.set()
    assert await second == key


async def test_unreadable_key_record_grants_no_access(store, caplog):
    store.fails = ValueError("the record of an API key cannot be read: x")
    assert await asked(store.known(), 1) == 401
    assert "cannot be read" in caplog.text
    assert secret_of(1) not in caplog.text
