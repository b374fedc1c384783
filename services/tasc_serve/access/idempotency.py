"""Requests with an ``Idempotency-Key``: a client's retry gets the answer of its first attempt.

Seed and id of an answer come from the key, so that a second run gives the same answer whatever
became of the first. The store only saves the second run, notices a key that is used for two
requests, and pins a retry to the version of the task that the first attempt met. While the store is
away requests go on without it.
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
    """An idempotency key and who sent it, as a hash."""

    digest: str

    @property
    def id(self) -> str:
        """The id of the answer."""
        return self.digest[:32]

    @property
    def seed(self) -> int:
        """The seed of the answer, unless the request brings one."""
        return int(self.digest[32:48], 16)


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that may come again.

    Attributes:
        record_version: Of the task's record, for this answer.
        answer: The answer of the first attempt, if it is known.
    """

    store: "Idempotency"
    task: str
    key: RequestKey
    record_version: int | None
    answer: bytes | None

    def response(self, media_type: str, headers: Mapping[str, str]) -> Response | None:
        """The answer once more, if it is known."""
        if self.answer is None:
            return None
        return Response(self.answer, 200, {**headers, **_REPLAYED}, media_type)

    def keep(self, answer: bytes) -> None:
        """Keep a whole answer, unless it is too long. Does not wait for the store."""
        self.store.keep(self.task, self.key, answer)

    async def keeping(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """The same events, kept if they come to their end."""
        kept = bytearray()
        async for event in events:
            if len(kept) <= self.store.max_bytes:
                kept += event.encode()
            yield event
        self.keep(bytes(kept))


class Idempotency:
    """The idempotent requests of one gateway.

    Args:
        attempts: Where first attempts are noted; None: nowhere, so that a retry runs again.
    """

    def __init__(self, attempts: IdempotencyStore | None, limits: LimitSettings) -> None:
        self._attempts = attempts
        self._calls = StoreCalls.of("idempotent requests", limits)
        self.max_bytes = limits.max_idempotent_bytes

    def close(self) -> None:
        """Note and keep nothing any more."""
        self._calls.close()

    def key_of(self, request: Request, sender: str) -> RequestKey | None:
        """The key of a request; None without one. Raises ApiError 400 for one that is too long."""
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
        """Note a first attempt, or find it. Raises ApiError 422: the key was another request's."""
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
        """A first attempt's, also where the store does not answer in time."""
        attempts = self._attempts
        if attempts:
            with suppress(StoreError):  # logged where it ends
                return await self._calls.run(lambda: attempts.claim(task, key.digest, note))
        return note, None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
