"""Calls of a store that is silent: nobody waits for long, and threads are not given out twice."""

import asyncio
import threading

import pytest

from tasc_serve.http_errors import ApiError
from tasc_serve.storage_calls import StorageCalls

PLACES = 64


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


def test_a_call_has_its_place_until_its_thread_is_free() -> None:
    calls, spoken = StorageCalls(wait_s=0.01), threading.Event()
    began = threading.Semaphore(0)

    def silent() -> None:
        began.release()
        spoken.wait()

    async def refused() -> str:
        with pytest.raises(ApiError) as error:
            await calls.run(silent)
        return error.value.message

    async def asked() -> None:
        said = await asyncio.gather(*(refused() for _ in range(PLACES + 1)))
        assert sum("too many" in message for message in said) == 1
        running = 0
        while began.acquire(blocking=False):
            running += 1
        assert 0 < running < PLACES
        # Those that never had a thread are gone, those that have one are not.
        said = await asyncio.gather(*(refused() for _ in range(PLACES)))
        assert sum("too many" in message for message in said) == running
        spoken.set()
        while True:  # until the threads are free
            try:
                assert await calls.run(lambda: "here") == "here"
                return
            except ApiError:
                await asyncio.sleep(0.01)

    try:
        asyncio.run(asked())
    finally:
        spoken.set()


def test_a_caller_that_leaves_takes_its_place_along_only_with_its_call() -> None:
    calls, spoken, began = StorageCalls(), threading.Event(), threading.Event()

    def silent() -> None:
        began.set()
        spoken.wait()

    async def asked() -> None:
        caller = asyncio.create_task(calls.run(silent))
        await asyncio.to_thread(began.wait)
        caller.cancel()
        others = [asyncio.create_task(calls.run(spoken.wait)) for _ in range(PLACES - 1)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many"):
            await calls.run(spoken.wait)
        spoken.set()
        assert all(await asyncio.gather(*others))
        with pytest.raises(asyncio.CancelledError):
            await caller

    try:
        asyncio.run(asked())
    finally:
        spoken.set()
