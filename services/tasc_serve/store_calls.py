"""Runs blocking store calls on threads that handle neither requests nor steps."""

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
# Errors of a failing store. Other subclasses of StoreError, such as UnknownFile, are answers of a
# working store.
_FAULTS = (StoreError, StoreUnreachable, StoreFull, StoreReadOnly, StoreTooOld)


class StoreCalls:
    """Runs blocking calls on a few threads, with a deadline and a limit on waiting calls.

    After a failure, no calls are made for ``pause_s``. Then one call is tried in each further
    ``pause_s``, until a call succeeds within the deadline. Without these pauses, each request would
    wait for the whole deadline.

    Args:
        name: Purpose of the calls, for the names of threads and for messages.
        threads: Number of calls that run at once.
        max_waiting: Maximum number of calls that run or wait for a thread, including abandoned
            ones.
        timeout_s: Maximum time of `run`, including the wait for a thread.
        pause_s: Time without calls after a failure.
    """

    def __init__(
        self, name: str, *, threads: int, max_waiting: int, timeout_s: float, pause_s: float = 0.0
    ) -> None:
        self._name, self._timeout_s, self._pause_s = name, timeout_s, pause_s
        self._threads = ThreadPoolExecutor(threads, name)
        self._max_waiting, self._room = max_waiting, threading.BoundedSemaphore(max_waiting)
        self._retry_at = 0.0
        self._crowded = False
        self.failing = False

    @classmethod
    def of(cls, name: str, limits: LimitSettings) -> "StoreCalls":
        """Creates an instance for calls with small values, with the limits of the settings."""
        return cls(
            name,
            threads=limits.store_threads,
            max_waiting=limits.max_store_calls,
            timeout_s=limits.store_timeout_s,
            pause_s=limits.store_pause_s,
        )

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Runs ``call`` and returns its result.

        Raises:
            StoreBusy: Too many calls wait, Redis does not answer in time, or calls pause after a
                failure.
            Exception: Any error of ``call``.
        """
        begun = self.begin(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(begun)
        except TimeoutError as error:
            busy = StoreBusy(
                f"{self._name}: no answer from Redis within {self._timeout_s:g} s; try again later"
            )
            self._failed(busy)
            raise busy from error

    def begin(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Starts a call without waiting for it.

        Raises:
            StoreBusy: Too many calls wait, calls pause after a failure, or the instance is closed.
        """
        now = time.monotonic()
        if self.failing and now < self._retry_at:
            raise StoreBusy(f"{self._name}: Redis failed a moment ago; try again later")
        crowded, self._crowded = self._crowded, not self._room.acquire(blocking=False)
        if self._crowded:
            busy = (
                f"{self._name}: {self._max_waiting} calls to Redis are running or waiting, "
                "which is the limit"
            )
            if not crowded:
                log.warning(
                    "%s; further calls are refused: check Redis, or raise limits.store_threads or "
                    "limits.max_store_calls",
                    busy,
                )
            raise StoreBusy(f"{busy}; try again later")
        self._retry_at = now + self._pause_s
        try:
            begun = self._threads.submit(call)
        except RuntimeError as error:  # closed, or no more threads can be started
            self._room.release()
            raise StoreBusy(f"{self._name}: cannot begin a call: {error}") from error
        # An abandoned call keeps its thread until Redis answers.
        begun.add_done_callback(partial(self._ended, now))
        return begun

    def close(self) -> None:
        """Accepts no more calls and cancels those that wait for a thread; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, begun_at: float, call: Future[Any]) -> None:
        self._room.release()
        if call.cancelled():
            return
        error = call.exception()
        if type(error) in _FAULTS:
            self._failed(error)
            return
        # A late answer means that Redis is slow. An error in our own code says nothing about Redis.
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
    """Calls ``work`` at once and then every ``every_s`` seconds, on a separate thread.

    An error is reported once, until a call succeeds again.

    Args:
        name: Purpose of the call, for the name of the thread and the log.
        last: Called on the same thread at `close`, after the last call of ``work``.
        wait_s: Maximum time that the constructor waits for the first call.
        report: Called with the message of an error; unset: the message is logged.

    Attributes:
        fault: The last call's error, as text; None after a success and before the first call.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        every_s: float,
        *,
        last: Callable[[], None] | None = None,
        wait_s: float = 0.0,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        self._report = report
        self._name, self._work, self._every_s, self._last = name, work, every_s, last
        self._called, self._closing = threading.Event(), threading.Event()
        self.fault: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._called.wait(wait_s)

    def close(self, timeout_s: float) -> bool:
        """Ends the repeated calls, then calls ``last``; returns whether the thread ended in time.

        If a call takes longer than ``timeout_s``, the thread ends later or with the process.
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
        except Exception as error:  # after any error, the next call may succeed
            if self.fault is None:
                self._report(f"{self._name} failed, will retry: {error}")
            self.fault = str(error) or repr(error)
            return
        if self.fault is not None:
            log.info("%s works again", self._name)
        self.fault = None
