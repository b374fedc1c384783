"""Requests with an ``Idempotency-Key``: a client's retry gets the answer of its first attempt.

The seed and id of an answer are derived from the key, so a second run gives the same answer even if
nothing is known of the first run. The store only avoids the second run, detects a key that is used
for two requests, and pins a retry to the task version of the first attempt. While the store is
unavailable, requests continue without these features.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request, Response

from tasc_serve.http_errors import ApiError
from tasc_serve.settings import LimitSettings
from tasc_serve.store_calls import StoreCalls
from tasc_store import IdempotencyStore, StoreError
from tasc_store.errors import StoreBusy

HEADER = "Idempotency-Key"
_REPLAYED = {"Idempotency-Replayed": "true"}
_LONGEST_KEY = 255


@dataclass(frozen=True)
class RequestKey:
    """A hash of an idempotency key and its sender."""

    digest: str

    @property
    def id(self) -> str:
        """The id of the answer."""
        return self.digest[:32]

    @property
    def seed(self) -> int:
        """The seed of the answer, unless the request has one."""
        return int(self.digest[32:48], 16)


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that may be repeated.

    Attributes:
        record_version: Version of the task's record for this answer.
        answer: The answer of the first attempt, if known.
    """

    store: "Idempotency"
    task: str
    key: RequestKey
    record_version: int | None
    answer: bytes | None

    def response(self, media_type: str, headers: Mapping[str, str]) -> Response | None:
        """A response with the first attempt's answer, if known."""
        if self.answer is None:
            return None
        return Response(self.answer, 200, {**headers, **_REPLAYED}, media_type)

    def keep(self, answer: bytes) -> None:
        """Stores a whole answer, unless it is too long. Does not wait for the store."""
        self.store.keep(self.task, self.key, answer)

    async def keeping(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """Yields the same events, and stores them if all of them were sent."""
        kept = bytearray()
        async for event in events:
            if len(kept) <= self.store.max_bytes:
                kept += event.encode()
            yield event
        self.keep(bytes(kept))


class Idempotency:
    """The idempotent requests of one gateway.

    Args:
        attempts: Store of first attempts; None: attempts are not stored, and a retry runs again.
    """

    def __init__(self, attempts: IdempotencyStore | None, limits: LimitSettings) -> None:
        self._attempts = attempts
        self._calls = StoreCalls.of("idempotent requests", limits)
        self.max_bytes = limits.max_idempotent_bytes

    def close(self) -> None:
        """Stops storing attempts and answers."""
        self._calls.close()

    def key_of(self, request: Request, sender: str) -> RequestKey | None:
        """Returns a request's key or None; raises ApiError 400 if it is empty or too long."""
        key = request.headers.get(HEADER)
        if key is None:
            return None
        if not 0 < len(key) <= _LONGEST_KEY:
            message = f"{HEADER} has {len(key)} characters; send 1 to {_LONGEST_KEY}"
            raise ApiError(400, message, HEADER)
        return RequestKey(_digest(f"{sender}\0{key}".encode()))

    async def claim(
        self, key: RequestKey, request: Request, body: bytes, task: str, record_version: int | None
    ) -> IdempotentRequest:
        """Stores or finds the first attempt; raises ApiError 422 if its request was different."""
        digest = _digest(request.url.path.encode() + b"\0" + body)
        note = json.dumps({"request": digest, "record_version": record_version})
        found, answer = await self._claimed(task, key, note)
        first = json.loads(found)
        if first["request"] != digest:
            message = f"this {HEADER} was sent with another request; a new request needs a new key"
            raise ApiError(422, message, HEADER)
        return IdempotentRequest(self, task, key, first["record_version"], answer)

    def keep(self, task: str, key: RequestKey, answer: bytes) -> None:
        attempts = self._attempts
        if attempts and len(answer) <= self.max_bytes:
            with suppress(StoreBusy):
                self._calls.begin(lambda: attempts.keep(task, key.digest, answer))

    async def _claimed(self, task: str, key: RequestKey, note: str) -> tuple[str, bytes | None]:
        """Returns the first attempt's values, or this attempt's values if the store fails."""
        attempts = self._attempts
        if attempts:
            with suppress(StoreError):  # logged by `StoreCalls`
                return await self._calls.run(lambda: attempts.claim(task, key.digest, note))
        return note, None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
