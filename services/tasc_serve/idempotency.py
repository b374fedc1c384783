"""A client's own retry gets the answer of its first try: requests with an ``Idempotency-Key``.

Seed and id of an answer come from the key, so that a second run of a request says what the first
said, whatever became of that. The store only saves the second run, notices a key that is used for
two requests, and holds a retry to the version of the task that the first try met; where it is away
requests go on without it.
"""

import asyncio
import dataclasses
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request, Response

from tasc_serve.calls import Call
from tasc_serve.http_errors import ApiError
from tasc_store import StoreError

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
_REPLAYED = {"Idempotency-Replayed": "true"}
_LONGEST_KEY = 255
_STORE_S = 2.0


class Tries(Protocol):
    """Where first tries are noted; see `tasc_store.FirstTries`."""

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]: ...

    def keep(self, task: str, name: str, answer: bytes) -> None: ...


class NoTries:
    """Remembers nothing: what is asked again is answered again."""

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        return note, None

    def keep(self, task: str, name: str, answer: bytes) -> None:
        pass


@dataclass(frozen=True)
class Tried:
    """A request that may come again.

    Attributes:
        name: Of its key and who sent it.
        record_version: Of the task's record, for this answer.
        answer: What its first try was answered, if it is known.
    """

    tries: Tries
    task: str
    name: str
    record_version: int | None
    answer: bytes | None
    max_bytes: int

    def marked(self, call: Call, *, seeded: bool) -> Call:
        """The call, with all that an answer's text and id depend on taken from the key."""
        seed = call.asked.seed if seeded else int(self.name[32:48], 16)
        asked = dataclasses.replace(call.asked, seed=seed)
        version = self.record_version
        return dataclasses.replace(call, id=self.name[:32], asked=asked, record_version=version)

    def response(self, media_type: str, headers: Mapping[str, str]) -> Response | None:
        """The answer once more, if it is known."""
        if self.answer is None:
            return None
        return Response(self.answer, 200, {**headers, **_REPLAYED}, media_type)

    async def keep(self, answer: bytes) -> None:
        """Keep an answer that was whole, unless it is too long."""
        if len(answer) <= self.max_bytes:
            try:
                async with asyncio.timeout(_STORE_S):
                    await asyncio.to_thread(self.tries.keep, self.task, self.name, answer)
            except (StoreError, TimeoutError) as error:
                log.warning("an answer is not kept for a retry: %r", error)

    async def keeping(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """The same events, kept if they come to their end."""
        kept, size = [], 0
        async for event in events:
            encoded = event.encode()
            size += len(encoded)
            if size <= self.max_bytes:
                kept.append(encoded)
            yield event
        if size <= self.max_bytes:
            await self.keep(b"".join(kept))


class Idempotency:
    """Args:
    max_bytes: Longest answer that is kept; a longer one is made again.
    """

    def __init__(self, tries: Tries, max_bytes: int) -> None:
        self._tries = tries
        self._max_bytes = max_bytes

    async def of(
        self, request: Request, body: bytes, task: str, sender: str, record_version: int | None
    ) -> Tried | None:
        """What is known of a request; None where it has no key.

        Raises:
            ApiError: The key is no good, or was another request's.
        """
        key = request.headers.get(HEADER)
        if key is None:
            return None
        if not 0 < len(key) <= _LONGEST_KEY:
            message = f"{HEADER} has {len(key)} characters; send 1 to {_LONGEST_KEY}"
            raise ApiError(400, message, HEADER)
        name = _digest(f"{sender}\0{key}".encode())
        asked = _digest(request.url.path.encode() + b"\0" + body)
        note = json.dumps({"request": asked, "record_version": record_version})
        found, answer = await self._claim(task, name, note)
        noted = json.loads(found)
        if noted["request"] != asked:
            message = f"this {HEADER} was sent with another request; a new request needs a new key"
            raise ApiError(422, message, HEADER)
        version = noted["record_version"]
        return Tried(self._tries, task, name, version, answer, self._max_bytes)

    async def _claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        try:
            async with asyncio.timeout(_STORE_S):
                return await asyncio.to_thread(self._tries.claim, task, name, note)
        except (StoreError, TimeoutError) as error:
            log.warning("a retry cannot be told from a first try: %r", error)
            return note, None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
