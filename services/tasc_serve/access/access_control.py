"""Admits requests to a gateway: drain, API keys and their tasks, rate limits."""

import asyncio
import logging
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import redis
from starlette.requests import Request

from tasc_protocol import Output
from tasc_serve.http_errors import ApiError
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.routing.choices import Numbered
from tasc_serve.settings import AuthSettings, ServedTask, ServeSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import ApiKey, ApiKeys, StoreError
from tasc_store.access import digest_of, is_key

log = logging.getLogger(__name__)

Find = Callable[[str], ApiKey | None]
Clock = Callable[[], float]
_SCHEME: Final = "bearer"
_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
_MINUTE_S: Final = 60.0
# Refills are sums of fractions, so a whole request must not wait for a rounding error.
_ROUNDING: Final = 1e-9
_DRAIN_POLL_S: Final = 0.05
_SHOWN_TASKS: Final = 20


@dataclass(frozen=True)
class _Seen:
    key: ApiKey | None
    at: float


class KnownKeys:
    """Caches keys as last read from the store, and hashes of unknown or revoked keys.

    The two kinds are cached separately, so that clients who guess keys cannot displace valid keys.
    The ``max_cached_keys`` most recently used entries of each kind are kept. While the store is
    unavailable, known keys keep their last state.

    Args:
        find: Looks a hash up in the store; raises StoreError when the store fails.
        calls: Runs ``find``.
    """

    def __init__(
        self,
        find: Find,
        settings: AuthSettings,
        calls: StoreCalls,
        clock: Clock = time.monotonic,
    ) -> None:
        self._find, self._settings, self._calls, self._clock = find, settings, calls, clock
        self._open: OrderedDict[str, _Seen] = OrderedDict()
        self._refused: OrderedDict[str, _Seen] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_Seen | None]] = {}

    def close(self) -> None:
        self._calls.close()

    async def of(self, authorization: str | None) -> ApiKey:
        """Returns the valid key in an ``Authorization`` header.

        Raises:
            ApiError: 401: the key is missing, unknown or revoked; 503: it cannot be checked.
        """
        secret = _secret(authorization)
        key = await self._known(digest_of(secret)) if is_key(secret) else None
        if key is None:
            message = "this API key is unknown or revoked; send another"
            raise ApiError(401, message, headers=_CHALLENGE)
        return key

    async def _known(self, digest: str) -> ApiKey | None:
        seen = self._remembered(digest)
        if seen and self._clock() - seen.at < self._settings.cache_ttl_s:
            return seen.key
        failing = self._calls.failing
        lookup = self._lookups.get(digest) or self._begin_lookup(digest)
        # No request waits for a store that has just failed. Several requests may share one look-up.
        found = None if failing else await asyncio.shield(lookup)
        found = found or seen
        if found is None or (found is seen and found.key is None):
            raise ApiError(503, "API keys cannot be checked at the moment; try again")
        return found.key

    def _remembered(self, digest: str) -> _Seen | None:
        for seen in (self._open, self._refused):
            if digest in seen:
                seen.move_to_end(digest)
                return seen[digest]
        return None

    def _begin_lookup(self, digest: str) -> asyncio.Task[_Seen | None]:
        lookup = self._lookups[digest] = asyncio.create_task(self._lookup(digest))
        lookup.add_done_callback(lambda _: self._lookups.pop(digest))
        return lookup

    async def _lookup(self, digest: str) -> _Seen | None:
        """Looks up a hash; returns None if the store does not answer."""
        try:
            key = await self._calls.run(lambda: self._find(digest))
        except StoreError:  # logged by `StoreCalls`
            return None
        except ValueError as error:
            log.error("an API key is refused: %s", error)
            key = None
        return self._remember(digest, key)

    def _remember(self, digest: str, key: ApiKey | None) -> _Seen:
        seen = _Seen(None if key is None or key.revoked else key, self._clock())
        self._open.pop(digest, None)
        self._refused.pop(digest, None)
        into = self._refused if seen.key is None else self._open
        into[digest] = seen
        if len(into) > self._settings.max_cached_keys:
            into.popitem(last=False)
        return seen


def _secret(authorization: str | None) -> str:
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() != _SCHEME or not secret.strip():
        message = "this service asks for an API key; send it as Authorization: Bearer KEY"
        raise ApiError(401, message, headers=_CHALLENGE)
    return secret.strip()


class Bucket:
    """A token bucket that fills at ``per_s`` up to ``size``. A negative level is a debt.

    Args:
        per_s: Number of units added per second.
        size: Maximum level, and the initial level.
    """

    def __init__(self, per_s: float, size: float, clock: Clock) -> None:
        self.per_s, self.size = per_s, max(size, 1.0)
        self._clock = clock
        self._level, self._at = self.size, clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at) * self.per_s)
        self._at = now
        return self._level

    def wait_s(self, count: float = 1.0) -> float:
        """Seconds until ``count`` can be taken; if ``size`` is less, until the bucket is full."""
        missing = min(count, self.size) - self.level
        return 0.0 if missing <= _ROUNDING else missing / self.per_s

    def full_s(self) -> float:
        """Seconds until the bucket is full."""
        return (self.size - self.level) / self.per_s

    def take(self, count: float) -> None:
        self._level = self.level - count


@dataclass(frozen=True)
class Over:
    """A limit that a request exceeds.

    Attributes:
        what: Owner of the limit: ``key`` or ``task``.
        message: Message for the client, which names the limit.
        wait_s: Seconds until there is room again, more than 0.
    """

    what: str
    message: str
    wait_s: float


@dataclass(frozen=True)
class _Limit:
    what: str
    message: str
    bucket: Bucket


@dataclass(frozen=True)
class _Key:
    requests: _Limit | None = None
    tokens: _Limit | None = None


_NO_KEY = _Key()


class Rates:
    """The buckets of one gateway.

    Args:
        gateways: Number of gateways that share each limit. Each gateway has an equal part of the
            limit, but at least one request.
        max_keys: Maximum number of keys whose buckets are kept, the most recently used ones. The
            buckets of other keys start full.
    """

    def __init__(
        self,
        tasks: Sequence[ServedTask],
        gateways: int,
        max_keys: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._gateways, self._max_keys, self._clock = gateways, max_keys, clock
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._tasks = {
            t.name: self._of_task(t.name, t.max_requests_per_s)
            for t in tasks
            if t.max_requests_per_s is not None
        }

    def take(self, key: ApiKey | None, task: str, requests: int = 1) -> Over | None:
        """Takes requests from every bucket, or takes none and returns the limit that is exceeded.

        If ``requests`` exceeds the size of a bucket, the bucket must be full, and gets a debt.
        """
        mine, shared = self._of(key), self._tasks.get(task)
        for limit, count in ((mine.requests, requests), (mine.tokens, 1), (shared, requests)):
            if limit and (wait_s := limit.bucket.wait_s(count)):
                return Over(limit.what, limit.message, wait_s)
        for limit in (mine.requests, shared):
            if limit:
                limit.bucket.take(requests)
        return None

    def spend(self, key: ApiKey | None, tokens: int) -> None:
        """Counts an answer's tokens after its end."""
        if limit := self._of(key).tokens:
            limit.bucket.take(tokens)

    def headers(self, key: ApiKey | None) -> Mapping[str, str]:
        """The limits of a key in this gateway as OpenAI's headers; empty without limits."""
        mine = self._of(key)
        found: dict[str, str] = {}
        for what, limit in (("requests", mine.requests), ("tokens", mine.tokens)):
            if limit:
                found[f"x-ratelimit-limit-{what}"] = str(int(limit.bucket.size))
                left = math.floor(limit.bucket.level + _ROUNDING)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, left))
                found[f"x-ratelimit-reset-{what}"] = duration(limit.bucket.full_s())
        return found

    def _of(self, key: ApiKey | None) -> _Key:
        if key is None:
            return _NO_KEY
        found = self._keys.pop(key.id, None)
        if found is None:
            found = _Key(
                self._of_key(key.requests_per_minute, "requests"),
                self._of_key(key.tokens_per_minute, "tokens"),
            )
        self._keys[key.id] = found
        if len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)
        return found

    def _of_key(self, limit: int | None, what: str) -> _Limit | None:
        if limit is None:
            return None
        message = f"this key may have {limit} {what} a minute; wait, or ask for a higher limit"
        return _Limit("key", message, self._bucket(limit / _MINUTE_S, _MINUTE_S))

    def _of_task(self, task: str, limit: float) -> _Limit:
        message = f"{task} takes {limit:g} requests a second from all clients together; wait"
        return _Limit("task", message, self._bucket(limit, 1.0))

    def _bucket(self, per_s: float, window_s: float) -> Bucket:
        share = per_s / self._gateways
        return Bucket(share, share * window_s, self._clock)


def retry_after(wait_s: float) -> str:
    """Whole seconds for the header, rounded up, at least 1."""
    return str(max(1, math.ceil(wait_s - _ROUNDING)))


def duration(seconds: float) -> str:
    """Formats seconds in OpenAI's form: ``17ms``, ``1.5s``, ``6m0s``."""
    ms = math.ceil(seconds * 1000 - _ROUNDING)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms / 1000, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


class InFlight:
    """Counts the requests of a gateway, and admits none after it is drained.

    It belongs to one event loop.

    Args:
        max_requests: Maximum number of requests at once; None: no limit.

    Attributes:
        inside: Number of requests that are being answered.
    """

    def __init__(self, max_requests: int | None = None) -> None:
        self.max_requests = max_requests
        self.inside = 0
        self.open = True

    def enter(self) -> None:
        """Admits a request; `leave` ends it.

        Raises:
            ApiError: The gateway is being stopped, or has its maximum number of requests.
        """
        self.require_open()
        if self.max_requests is not None and self.inside >= self.max_requests:
            message = f"this gateway already has {self.inside} requests, its maximum; try again"
            raise ApiError(503, message, code="service_full", headers={"Retry-After": "1"})
        self.inside += 1

    def leave(self) -> None:
        """Ends an admitted request, which was answered or whose client disconnected."""
        self.inside -= 1

    def require_open(self) -> None:
        """Raises ApiError if the gateway is being stopped."""
        if not self.open:
            message = "this gateway is being stopped; send the request again"
            raise ApiError(503, message, headers={"Connection": "close"})

    async def drain(self, timeout_s: float) -> int:
        """Admits no more requests, waits for the others, and returns how many did not end."""
        self.open = False
        deadline = time.monotonic() + timeout_s
        while self.inside and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.inside


class AccessControl:
    """Controls access to the endpoints of one gateway.

    Args:
        keys: Looks up API keys; None: no key is required or read.
        rates: Rate limits; None: no limits.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        keys: KnownKeys | None = None,
        rates: Rates | None = None,
    ) -> None:
        self._metrics, self._keys, self._rates = metrics, keys, rates or Rates((), 1, 1)

    @classmethod
    def of(
        cls, settings: ServeSettings, client: redis.Redis, metrics: GatewayMetrics
    ) -> "AccessControl":
        """Creates the access control of one gateway from the settings."""
        auth = settings.auth
        calls = StoreCalls.of("API keys", settings.limits)
        keys = KnownKeys(ApiKeys(client).find, auth, calls) if auth.required else None
        rates = Rates(settings.tasks, settings.http.gateways, auth.max_cached_keys)
        return cls(metrics, keys, rates)

    def close(self) -> None:
        """Stops looking up keys."""
        if self._keys:
            self._keys.close()

    async def key_of(self, request: Request) -> ApiKey | None:
        """Returns the key of a request; None if keys are not required.

        Raises:
            ApiError: 401: the key is missing, unknown or revoked; 503: it cannot be checked.
        """
        return await self._keys.of(request.headers.get("authorization")) if self._keys else None

    def visible(self, key: ApiKey | None, tasks: Sequence[str]) -> list[str]:
        """The tasks among ``tasks`` that a key may use."""
        return [task for task in tasks if key is None or key.may_use(task)]

    def allow(self, key: ApiKey | None, task: str) -> None:
        """Raises ApiError 403 for a task, served or not, that the key may not use."""
        if key is None or key.may_use(task):
            return
        shown = ", ".join(key.tasks[:_SHOWN_TASKS])
        more = " and others" if len(key.tasks) > _SHOWN_TASKS else ""
        message = f"this API key may not use that model; it may use {shown}{more}"
        raise ApiError(403, message, "model", "model_not_allowed")

    def admit(self, key: ApiKey | None, task: str, prompts: int = 1) -> "Permit":
        """Counts a request against the limits.

        Args:
            task: The name of a served task.
            prompts: Number of prompts of the request; each counts as a request.

        Raises:
            ApiError: 429 with ``Retry-After``: a limit is exceeded; the request is not counted.
        """
        over = self._rates.take(key, task, prompts)
        left = self._rates.headers(key)
        if over is None:
            return Permit(left, lambda tokens: self._rates.spend(key, tokens))
        self._metrics.limited(task, over.what).inc()
        headers = {**left, "Retry-After": retry_after(over.wait_s)}
        raise ApiError(429, over.message, headers=headers)


@dataclass(frozen=True)
class Permit:
    """An admitted request.

    Attributes:
        headers: Headers of the response, which show how much of the key's limits is left.
        spend: Called with the number of tokens of the answer.
    """

    headers: Mapping[str, str]
    spend: Callable[[int], None]

    async def counting(
        self, outputs: AsyncGenerator[Numbered, None]
    ) -> AsyncGenerator[Numbered, None]:
        """Yields the same outputs; counts sent tokens, even if the client disconnects."""
        counted: defaultdict[int, int] = defaultdict(int)
        async with aclosing(outputs):
            async for index, output in outputs:
                if isinstance(output, Output):
                    now = counted[index] + len(output.tokens)
                    now = len(output.result.tokens) if output.result else now
                    self.spend(now - counted[index])
                    counted[index] = now
                yield index, output
