"""Calls of a store that waits, beside requests that must not. It knows no file and no batch."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from tasc_serve.http_errors import ApiError
from tasc_store import CorruptArtifact, StoreError, StoreFull
from tasc_store.errors import (
    BatchEnded,
    BatchesFull,
    FileInUse,
    FilesFull,
    LinesFull,
    UnknownBatch,
    UnknownFile,
)

log = logging.getLogger(__name__)

Found = TypeVar("Found")
_THREADS: Final = 4
_MOST_WAITING: Final = 64
_WAIT_S: Final = 20.0  # longer than a call of a silent Redis, which then fails in its own words
_CODES: Final[tuple[tuple[type[StoreError], int, str], ...]] = (
    (UnknownFile, 404, "file_not_found"),
    (UnknownBatch, 404, "batch_not_found"),
    (FileInUse, 400, "file_in_use"),
    (BatchEnded, 400, "batch_ended"),
    (FilesFull, 429, "too_many_files"),
    (BatchesFull, 429, "too_many_batches"),
    (LinesFull, 429, "too_many_batch_lines"),
    (CorruptArtifact, 500, "file_damaged"),
)


class StorageCalls:
    """Threads of their own: a store that is silent holds up nothing but what asks for it.

    Args:
        wait_s: Longest time that one call takes, waiting for a thread included.
    """

    def __init__(self, wait_s: float = _WAIT_S) -> None:
        self._wait_s = wait_s
        self._threads = ThreadPoolExecutor(_THREADS, "storage")
        self._places = threading.BoundedSemaphore(_MOST_WAITING)

    async def run(self, work: Callable[[], Found]) -> Found:
        """What ``work`` gives.

        Raises:
            ApiError: What is asked for is not there, or cannot be; 503 when the store fails, is
                silent, or too many calls wait for it.
        """
        if not self._places.acquire(blocking=False):
            raise ApiError(503, "too many requests wait for the store of files; try again later")
        running = self._threads.submit(work)
        # Not when nobody waits any more: until then it has a thread, or is about to have one.
        running.add_done_callback(lambda _: self._places.release())
        try:
            async with asyncio.timeout(self._wait_s):
                return await asyncio.wrap_future(running)
        except TimeoutError as error:
            message = f"the store of files gave no answer in {self._wait_s:g} s; try again later"
            raise ApiError(503, message) from error
        except StoreError as error:
            raise _told(error) from error


def _told(error: StoreError) -> ApiError:
    for kind, status, code in _CODES:
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code)
    log.warning("the store of files and batches fails: %s", error)
    if isinstance(error, StoreFull):
        return ApiError(503, "the store is full; delete files that you need no more")
    return ApiError(503, "files and batches cannot be reached at the moment; try again later")
