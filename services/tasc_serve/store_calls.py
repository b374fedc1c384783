"""Blocking calls of the store, kept off the threads that requests and steps need."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tasc_serve.settings import LimitSettings
from tasc_store import StoreError, StoreFull, StoreReadOnly, StoreTooOld, StoreUnreachable

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
# Other subclasses of StoreError are answers of a store that works, such as UnknownFile.
_FAULTS = (StoreError, StoreUnreachable, StoreFull, StoreReadOnly, StoreTooOld)


class StoreBusy(StoreError):
    """The store does not answer in time, is left alone after a failure, or has too many callers."""


class StoreCalls:
    """Runs blocking calls on a few threads, with a deadline and a bound on how many wait.

    After a failure the store is left alone for a moment, then tried with one call at a time until
    one succeeds: it would otherwise cost each request the whole deadline.

    Args:
        name: What the calls are for; it names the threads and stands in messages.
        threads: Calls that run at once.
        max_waiting: Calls that run or wait for a thread, those that nobody waits for included.
        timeout_s: Longest time that `run` takes, waiting for a thread included.
        pause_s: How long the store is left alone after a failure.
    """

    def __init__(
        self, name: str, *, threads: int, max_waiting: int, timeout_s: float, pause_s: float = 0.0
    ) -> None:
        self._name, self._timeout_s, self._pause_s = name, timeout_s, pause_s
        self._threads = ThreadPoolExecutor(threads, name)
        self._room = threading.BoundedSemaphore(max_waiting)
        self._retry_at = 0.0
        self.failing = False

    @classmethod
    def of(cls, name: str, limits: LimitSettings) -> "StoreCalls":
        """Calls for small values, bounded as the settings say."""
        return cls(
            name,
            threads=limits.store_threads,
            max_waiting=limits.max_store_calls,
            timeout_s=limits.store_timeout_s,
            pause_s=limits.store_pause_s,
        )

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Return what ``call`` returns.

        Raises:
            StoreBusy: There is no room or no answer in time, or the store is left alone.
            Exception: What ``call`` raises.
        """
        begun = self.begin(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(begun)
        except TimeoutError as error:
            busy = StoreBusy(f"{self._name}: no answer of Redis within {self._timeout_s:g} s")
            self._failed(busy)
            raise busy from error

    def begin(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Begin a call without waiting for it.

        Raises:
            StoreBusy: There is no room, or the store is left alone.
        """
        now = time.monotonic()
        if self.failing and now < self._retry_at:
            raise StoreBusy(f"{self._name}: Redis failed a moment ago; try again later")
        if not self._room.acquire(blocking=False):
            raise StoreBusy(f"{self._name}: too many requests wait for Redis; try again later")
        self._retry_at = now + self._pause_s
        begun = self._threads.submit(call)
        # A call that nobody waits for any more has its thread until Redis answers.
        begun.add_done_callback(self._ended)
        return begun

    def _ended(self, call: Future[Any]) -> None:
        self._room.release()
        if call.cancelled():
            return
        error = call.exception()
        if type(error) in _FAULTS:
            self._failed(error)
        elif self.failing:
            self.failing = False
            log.info("%s: Redis answers again", self._name)

    def _failed(self, error: BaseException | None) -> None:
        if not self.failing:
            log.warning("%s: Redis fails, will retry: %s", self._name, error)
        self.failing = True
        self._retry_at = time.monotonic() + self._pause_s


class RepeatedCall:
    """Calls ``work`` at once and then every ``every_s`` seconds, on a thread of its own.

    What it raises is logged once, until a call succeeds again.

    Args:
        name: What the call does; it names the thread and stands in the log.

    Attributes:
        fault: What the last call raised, as text; None after a success.
    """

    def __init__(self, name: str, work: Callable[[], None], every_s: float) -> None:
        self._name, self._work, self._every_s = name, work, every_s
        self._closing = threading.Event()
        self.fault: str | None = None
        self._call()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Call it for the last time, and wait for that up to ``timeout_s``."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._every_s)
            self._call()

    def _call(self) -> None:
        try:
            self._work()
        except Exception as error:  # whatever it is, the next call may succeed
            if self.fault is None:
                log.warning("%s failed, will retry: %s", self._name, error)
            self.fault = str(error) or repr(error)
            return
        if self.fault is not None:
            log.info("%s works again", self._name)
        self.fault = None
