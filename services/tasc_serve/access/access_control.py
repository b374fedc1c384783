"""Admits requests by API key, the tasks of the key, and rate limits."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import redis
from starlette.requests import Request

from tasc_runtime.protocol import Piece
from tasc_serve.access.auth import KnownKeys
from tasc_serve.access.rates import Rates, retry_after
from tasc_serve.errors import ApiError
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.routing.choices import Numbered
from tasc_serve.settings import ServeSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import ApiKey, ApiKeys

_SHOWN_TASKS = 20


class AccessControl:
    """Stands in front of the endpoints of one gateway.

    Args:
        keys: Looks up API keys; without it no key is required and none is read.
        rates: Rate limits; without it there are none.
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
        """The access control of one of ``http.gateways``, as the settings say."""
        auth = settings.auth
        calls = StoreCalls.of("API keys", settings.limits)
        keys = KnownKeys(ApiKeys(client).find, auth, calls) if auth.required else None
        rates = Rates(settings.tasks, settings.http.gateways, auth.max_cached_keys)
        return cls(metrics, keys, rates)

    async def key_of(self, request: Request) -> ApiKey | None:
        """The key of a request; None where keys are not required.

        Raises:
            ApiError: 401 for no key, an unknown or a revoked one; 503 when nobody can say.
        """
        return await self._keys.of(request.headers.get("authorization")) if self._keys else None

    def visible(self, key: ApiKey | None, tasks: Sequence[str]) -> list[str]:
        """Those of the tasks that a key may use."""
        return [task for task in tasks if key is None or key.may_use(task)]

    def allow(self, key: ApiKey | None, task: str) -> None:
        """Raises ApiError 403 for a task, served or not, that the key may not use."""
        if key is None or key.may_use(task):
            return
        shown = ", ".join(key.tasks[:_SHOWN_TASKS])
        more = " and others" if len(key.tasks) > _SHOWN_TASKS else ""
        message = f"this API key may not use that model; it may use {shown}{more}"
        raise ApiError(403, message, "model", "model_not_allowed")

    def admit(self, key: ApiKey | None, task: str) -> "Permit":
        """Take a request's place within the limits.

        Args:
            task: The name of a served task.

        Raises:
            ApiError: 429, with ``Retry-After``; nothing was taken then.
        """
        over = self._rates.take(key, task)
        left = self._rates.headers(key)
        if over is None:
            return Permit(left, lambda tokens: self._rates.spend(key, tokens))
        self._metrics.observe_limited(task, over.what)
        headers = {**left, "Retry-After": retry_after(over.wait_s)}
        raise ApiError(429, over.message, headers=headers)


@dataclass(frozen=True)
class Permit:
    """A request that was admitted.

    Attributes:
        headers: What is left of its key's limits, for the answer.
        spend: Takes the number of tokens that the answer had.
    """

    headers: Mapping[str, str]
    spend: Callable[[int], None]

    async def counting(
        self, pieces: AsyncGenerator[Numbered, None]
    ) -> AsyncGenerator[Numbered, None]:
        """The same pieces; what a client has got is counted, also if it leaves before the end."""
        counted: defaultdict[int, int] = defaultdict(int)
        async with aclosing(pieces):
            async for index, piece in pieces:
                if isinstance(piece, Piece):
                    now = counted[index] + len(piece.ids)
                    now = len(piece.result.tokens) if piece.result else now
                    self.spend(now - counted[index])
                    counted[index] = now
                yield index, piece
