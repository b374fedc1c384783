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
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from tasc_runtime.protocol import Call
from tasc_serve.errors import ApiError

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
_REPLAYED = {"Idempotency-Replayed": "true"}
_LONGEST_KEY = 255
_STORE_S = 2.0
_PAUSE_S = 1.0  # between two calls while the store is away
_THREADS = 4
_MOST_OPEN = 256
T = TypeVar("T")


class Tries(Protocol):
    """Where first tries are noted; see `tasc_store.IdempotencyStore`."""

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]: ...

    def keep(self, task: str, name: str, answer: bytes) -> None: ...


class NoTries:
    """Remembers nothing: what is asked again is answered again."""

    def claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        return note, None

    def keep(self, task: str, name: str, answer: bytes) -> None:
        pass


@dataclass(frozen=True)
class IdempotentRequest:
    """A request that may come again.

    Attributes:
        name: Of its key and who sent it.
        record_version: Of the task's record, for this answer.
        answer: What its first try was answered, if it is known.
    """

    tries: Tries
    store: "StoreThreads"
    task: str
    name: str
    record_version: int | None
    answer: bytes | None
    max_bytes: int

    def marked(self, call: Call, *, seeded: bool) -> Call:
        """The call, with all that an answer's text and id depend on taken from the key."""
        seed = call.options.seed if seeded else int(self.name[32:48], 16)
        asked = dataclasses.replace(call.options, seed=seed)
        version = self.record_version
        return dataclasses.replace(call, id=self.name[:32], options=asked, record_version=version)

    def response(self, media_type: str, headers: Mapping[str, str]) -> Response | None:
        """The answer once more, if it is known."""
        if self.answer is None:
            return None
        return Response(self.answer, 200, {**headers, **_REPLAYED}, media_type)

    def keep(self, answer: bytes) -> None:
        """Keep an answer that was whole, unless it is too long; nobody waits for it."""
        if len(answer) <= self.max_bytes:
            self.store.begin(lambda: self.tries.keep(self.task, self.name, answer))

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
            self.keep(b"".join(kept))


class StoreThreads:
    """Asks the store on threads of its own, and leaves it alone for a moment after a failure.

    A store that is silent would otherwise take threads that all requests need, and each of its
    callers seconds.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "first-tries")
        self._places = threading.Semaphore(_MOST_OPEN)
        self._not_before = 0.0

    def begin(self, call: Callable[[], T]) -> Future[T] | None:
        """Begin a call; None where the store is left alone or too many wait for it."""
        if time.monotonic() < self._not_before or not self._places.acquire(blocking=False):
            return None
        begun = self._threads.submit(call)
        begun.add_done_callback(self._ended)
        return begun

    def leave_alone(self) -> None:
        """For a moment: it has failed, or takes too long."""
        self._not_before = time.monotonic() + _PAUSE_S

    def _ended(self, done: Future[Any]) -> None:
        self._places.release()
        if not done.cancelled() and (error := done.exception()):
            log.warning("first tries are not noted for a moment: %r", error)
            self.leave_alone()


class Idempotency:
    """Args:
    max_bytes: Longest answer that is kept; a longer one is made again.
    """

    def __init__(self, tries: Tries, max_bytes: int) -> None:
        self._tries = tries
        self._store = StoreThreads()
        self._max_bytes = max_bytes

    async def of(
        self, request: Request, body: bytes, task: str, sender: str, record_version: int | None
    ) -> IdempotentRequest | None:
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
        return IdempotentRequest(
            self._tries, self._store, task, name, version, answer, self._max_bytes
        )

    async def _claim(self, task: str, name: str, note: str) -> tuple[str, bytes | None]:
        """As a first try where the store does not say in time."""
        claimed = self._store.begin(lambda: self._tries.claim(task, name, note))
        if claimed is None:
            return note, None
        try:
            async with asyncio.timeout(_STORE_S):
                return await asyncio.wrap_future(claimed)
        except Exception as error:  # said where it ended, but for one that has not
            if isinstance(error, TimeoutError):
                self._store.leave_alone()
        return note, None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
