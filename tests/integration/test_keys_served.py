"""Tests that keys work until they are revoked, and also while Redis is unavailable."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace

import pytest
import redis
from prometheus_client import CollectorRegistry

from support import DEADLINE_S
from tasc_serve.access.access_control import AccessControl
from tasc_serve.http_errors import ApiError
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import ServeSettings
from tasc_store import ApiKeys, EmbeddedRedis, connect

pytestmark = [pytest.mark.redis, pytest.mark.anyio]
CACHE_S = 0.05


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with connect(server.url, timeout_s=0.5) as client:
        yield client


@pytest.fixture
def access(client: redis.Redis) -> AccessControl:
    auth = {"required": True, "cache_ttl_s": CACHE_S}
    settings = ServeSettings.model_validate({"tasks": [{"name": "t"}], "auth": auth})
    return AccessControl.of(settings, client, GatewayMetrics(CollectorRegistry()))


async def status(access: AccessControl, secret: str) -> int:
    """Returns the status of a request with this key."""
    request = SimpleNamespace(headers={"authorization": f"Bearer {secret}"})
    try:
        await access.key_of(request)
    except ApiError as error:
        return error.status
    return 200


async def eventually(access: AccessControl, secret: str, wanted: int) -> AsyncGenerator[int, None]:
    """Yields every status until the wanted one, which must occur."""
    async with asyncio.timeout(DEADLINE_S):
        while (found := await status(access, secret)) != wanted:
            yield found
            await asyncio.sleep(0.01)


async def test_a_revoked_key_is_refused_soon_and_others_are_not(
    client: redis.Redis, access: AccessControl
) -> None:
    keys = ApiKeys(client)
    (secret, key), (other, _) = keys.create("revoked"), keys.create("kept")
    assert [await status(access, s) for s in (secret, other)] == [200, 200]
    keys.revoke(key.id)
    assert {code async for code in eventually(access, secret, 401)} <= {200}
    assert await status(access, other) == 200


async def test_a_key_made_after_it_was_refused_is_taken_soon(
    client: redis.Redis, access: AccessControl
) -> None:
    secret, _ = ApiKeys(client).create("late")
    record = client.hgetall("tasc:api-keys")
    client.delete("tasc:api-keys")
    assert await status(access, secret) == 401
    client.hset("tasc:api-keys", mapping=record)
    assert {code async for code in eventually(access, secret, 200)} <= {401}


async def test_without_redis_keys_seen_before_go_on(
    server: EmbeddedRedis, client: redis.Redis, access: AccessControl
) -> None:
    secret, _ = ApiKeys(client).create("seen")
    unseen, _ = ApiKeys(client).create("unseen")
    assert await status(access, secret) == 200
    server.close()
    await asyncio.sleep(2 * CACHE_S)  # cached keys have expired
    for _ in range(5):
        assert [await status(access, s) for s in (secret, unseen)] == [200, 503]
