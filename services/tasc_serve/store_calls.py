"""Blocking calls of the store, kept off the threads that requests and steps need."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tasc_serve.settings import LimitSettings
from tasc_store import StoreError, StoreFull, StoreReadOnly, StoreTooOld, StoreUnreachable
from tasc_store.errors import StoreBusy

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
# Other subclasses of StoreError are answers of a store that works, such as UnknownFile.
_FAULTS = (StoreError, StoreUnreachable, StoreFull, StoreReadOnly, StoreTooOld)


class StoreCalls:
    """Runs blocking calls on a few threads, with a deadline and a bound on how many wait.

    After a failure the store is left alone for a moment, then tried with one call at a time until
    one succeeds within the deadline: it would otherwise cost each request the whole deadline.

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
        self._most, self._room = max_waiting, threading.BoundedSemaphore(max_waiting)
        self._retry_at = 0.0
        self._crowded = False
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
            busy = StoreBusy(
                f"{self._name}: no answer of Redis within {self._timeout_s:g} s; try again later"
            )
            self._failed(busy)
            raise busy from error

    def begin(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Begin a call without waiting for it.

        Raises:
            StoreBusy: There is no room, the store is left alone, or the calls are closed.
        """
        now = time.monotonic()
        if self.failing and now < self._retry_at:
            raise StoreBusy(f"{self._name}: Redis failed a moment ago; try again later")
        crowded, self._crowded = self._crowded, not self._room.acquire(blocking=False)
        if self._crowded:
            busy = StoreBusy(
                f"{self._name}: {self._most} calls to Redis are running or waiting, which is the "
                "limit; try again later"
            )
            if not crowded:
                log.warning("%s (limits of store calls)", busy)
            raise busy
        self._retry_at = now + self._pause_s
        try:
            begun = self._threads.submit(call)
        except RuntimeError as error:  # closed, or the process may have no more threads
            self._room.release()
            raise StoreBusy(f"{self._name}: cannot begin a call: {error}") from error
        # A call that nobody waits for any more has its thread until Redis answers.
        begun.add_done_callback(partial(self._ended, now))
        return begun

    def close(self) -> None:
        """Take no more calls and cancel those that wait for a thread; wait for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, begun_at: float, call: Future[Any]) -> None:
        self._room.release()
        if call.cancelled():
            return
        error = call.exception()
        if type(error) in _FAULTS:
            self._failed(error)
            return
        # A late answer says that Redis is slow, and an error of our own says nothing about it.
        in_time = time.monotonic() - begun_at < self._timeout_s
        if self.failing and in_time and (error is None or isinstance(error, StoreError)):
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
        last: Called on that thread when it closes, behind the last call of ``work``.
        wait_s: Longest time that the constructor waits for the first call.

    Attributes:
        fault: What the last call raised, as text; None after a success and before the first call.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        every_s: float,
        *,
        last: Callable[[], None] | None = None,
        wait_s: float = 0.0,
    ) -> None:
        self._name, self._work, self._every_s, self._last = name, work, every_s, last
        self._called, self._closing = threading.Event(), threading.Event()
        self.fault: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._called.wait(wait_s)

    def close(self, timeout_s: float) -> bool:
        """Make the last call, if there is one; whether the thread ended within ``timeout_s``.

        A thread that is still in a call then ends behind it, or with the process.
        """
        self._closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._call(self._work)
        self._called.set()
        while not self._closing.wait(self._every_s):
            self._call(self._work)
        if self._last:
            self._call(self._last)

    def _call(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever it is, the next call may succeed
            if self.fault is None:
                log.warning("%s failed, will retry: %s", self._name, error)
            self.fault = str(error) or repr(error)
            return
        if self.fault is not None:
            log.info("%s works again", self._name)
        self.fault = None
