"""Rate limits of keys and tasks as exact token buckets, for one gateway's share of them.

The buckets belong to one event loop and need no locks.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tasc_serve.settings import ServedTask
from tasc_store import ApiKey

Clock = Callable[[], float]
_MINUTE_S: Final = 60.0
# What refilling adds is a sum of fractions: a whole request must not wait for the last of them.
_ROUNDING: Final = 1e-9


class Bucket:
    """Fills at ``per_s`` up to ``size``; what is taken may leave less than nothing, as a debt.

    Args:
        per_s: How many come back in a second.
        size: Most that it holds, and what it begins with.
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

    def wait_s(self) -> float:
        """Seconds until one can be taken; 0 where it can."""
        missing = 1.0 - self.level
        return 0.0 if missing <= _ROUNDING else missing / self.per_s

    def full_s(self) -> float:
        """Seconds until it is full."""
        return (self.size - self.level) / self.per_s

    def take(self, count: float) -> None:
        self._level = self.level - count


@dataclass(frozen=True)
class Over:
    """A limit that a request meets.

    Attributes:
        what: Whose limit it is: ``key`` or ``task``.
        message: For the client; it names the limit.
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


class Rates:
    """The buckets of one gateway.

    Args:
        gateways: How many share every limit; each holds an equal part, but room for one request.
        most_keys: Keys whose buckets are kept, the ones used last; other buckets start full again.
    """

    def __init__(
        self,
        tasks: Sequence[ServedTask],
        gateways: int,
        most_keys: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self._gateways, self._most_keys, self._clock = gateways, most_keys, clock
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._tasks = {
            t.name: self._of_task(t.name, t.max_requests_per_s)
            for t in tasks
            if t.max_requests_per_s is not None
        }

    def take(self, key: ApiKey | None, task: str) -> Over | None:
        """One request's place in every bucket, or in none: then the limit that it meets."""
        mine, shared = self._of(key), self._tasks.get(task)
        for limit in (mine.requests, mine.tokens, shared):
            if limit and (wait_s := limit.bucket.wait_s()):
                return Over(limit.what, limit.message, wait_s)
        for limit in (mine.requests, shared):
            if limit:
                limit.bucket.take(1)
        return None

    def spend(self, key: ApiKey | None, tokens: int) -> None:
        """Count an answer's tokens, when it has ended."""
        if limit := self._of(key).tokens:
            limit.bucket.take(tokens)

    def headers(self, key: ApiKey | None) -> Mapping[str, str]:
        """Limits of a key in OpenAI's headers, as they are in this gateway; none without limits."""
        mine = self._of(key)
        found: dict[str, str] = {}
        for what, limit in (("requests", mine.requests), ("tokens", mine.tokens)):
            if limit:
                found[f"x-ratelimit-limit-{what}"] = str(int(limit.bucket.size))
                found[f"x-ratelimit-remaining-{what}"] = str(_whole(limit.bucket.level))
                found[f"x-ratelimit-reset-{what}"] = duration(limit.bucket.full_s())
        return found

    def _of(self, key: ApiKey | None) -> _Key:
        if key is None:
            return _Key()
        found = self._keys.pop(key.id, None)
        if found is None:
            found = _Key(
                self._of_key(key.requests_per_minute, "requests"),
                self._of_key(key.tokens_per_minute, "tokens"),
            )
        self._keys[key.id] = found
        if len(self._keys) > self._most_keys:
            self._keys.popitem(last=False)
        return found

    def _of_key(self, limit: int | None, what: str) -> _Limit | None:
        if limit is None:
            return None
        message = f"this key may have {limit} {what} a minute; wait, or ask for a higher limit"
        return _Limit("key", message, self._bucket(limit / _MINUTE_S, _MINUTE_S))

    def _of_task(self, task: str, limit: float) -> _Limit:
        message = f"{task} takes {limit:g} requests a second, of all clients together; wait"
        return _Limit("task", message, self._bucket(limit, 1.0))

    def _bucket(self, per_s: float, window_s: float) -> Bucket:
        share = per_s / self._gateways
        return Bucket(share, share * window_s, self._clock)


def retry_after(wait_s: float) -> str:
    """Whole seconds, for the header: rounded up, at least 1."""
    return str(max(1, math.ceil(wait_s - _ROUNDING)))


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``17ms``, ``1.5s``, ``6m0s``."""
    ms = math.ceil(seconds * 1000 - _ROUNDING)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms / 1000, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


def _whole(level: float) -> int:
    return max(0, math.floor(level + _ROUNDING))
