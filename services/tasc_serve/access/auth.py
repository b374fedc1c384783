"""Whose request it is: API keys as the store has them, remembered for a while."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tasc_serve.errors import ApiError
from tasc_serve.settings import AuthSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import ApiKey, StoreError
from tasc_store.access.api_keys import digest_of, is_key

log = logging.getLogger(__name__)

Find = Callable[[str], ApiKey | None]
_SCHEME: Final = "bearer"
_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}


@dataclass(frozen=True)
class _Seen:
    key: ApiKey | None
    at: float


class KnownKeys:
    """Keys as they were last seen in the store, and hashes that are no open key's.

    Of each the ``max_cached_keys`` that were used last are kept: clients who guess keys cannot
    displace those that work. While the store is away known keys count as last seen.

    Args:
        find: Looks a hash up in the store; raises StoreError when the store fails.
        calls: Runs ``find``.
    """

    def __init__(
        self,
        find: Find,
        settings: AuthSettings,
        calls: StoreCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._settings, self._calls, self._clock = find, settings, calls, clock
        self._open: OrderedDict[str, _Seen] = OrderedDict()
        self._refused: OrderedDict[str, _Seen] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[_Seen | None]] = {}

    async def of(self, authorization: str | None) -> ApiKey:
        """The open key in an ``Authorization`` header.

        Raises:
            ApiError: 401 for no key, an unknown or a revoked one; 503 when nobody can say.
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
        # Nobody waits for a store that failed a moment ago. Others may wait for the same look-up.
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
        """None when the store does not answer."""
        try:
            key = await self._calls.run(lambda: self._find(digest))
        except StoreError:  # logged where it ends
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
