"""Calls of a store that is silent: nobody waits for long, and threads are not given out twice."""

import asyncio
import threading

import pytest

from tasc_serve.http_errors import ApiError
from tasc_serve.storage_calls import StorageCalls

THREADS, PLACES = 4, 64


def test_a_store_that_is_silent_is_said_in_time_and_to_be_tried_again() -> None:
    calls, spoken = StorageCalls(wait_s=0.01), threading.Event()

    async def ask() -> None:
        with pytest.raises(ApiError, match="gave no answer") as refused:
            await calls.run(spoken.wait)
        assert refused.value.status == 503
        assert "Retry-After" in refused.value.response().headers

    try:
        asyncio.run(ask())
    finally:
        spoken.set()


def test_a_call_that_nobody_waits_for_has_its_place_until_its_thread_is_free() -> None:
    calls, spoken, began = StorageCalls(), threading.Event(), threading.Semaphore(0)

    def silent() -> bool:
        began.release()
        return spoken.wait()

    async def asked() -> None:
        left = [asyncio.create_task(calls.run(silent)) for _ in range(PLACES)]
        for _ in range(THREADS):
            assert await asyncio.to_thread(began.acquire, timeout=10)
        for caller in left:
            caller.cancel()
        await asyncio.wait(left)
        # Of those that left only the calls that had no thread are gone.
        others = [asyncio.create_task(calls.run(silent)) for _ in range(PLACES - THREADS)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many"):
            await calls.run(silent)
        spoken.set()
        assert all(await asyncio.gather(*others))
        assert await calls.run(silent)

    try:
        asyncio.run(asked())
    finally:
        spoken.set()
