"""Tests that calls of the store are bounded in number and time, and survive its failures."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from support import DEADLINE_S, eventually, refused
from tasc_serve.store_calls import RepeatedCall, StoreCalls
from tasc_store import StoreUnreachable
from tasc_store.errors import StoreBusy, UnknownFile

pytestmark = pytest.mark.anyio
THREADS, ROOM = 2, 8


def calls_with(**bounds: float) -> StoreCalls:
    bounds = {"threads": THREADS, "max_waiting": ROOM, "timeout_s": DEADLINE_S, **bounds}
    return StoreCalls("test", **bounds)  # type: ignore[arg-type]


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set when the store begins to answer."""
    event = threading.Event()
    yield event
    event.set()


def test_call_of_a_silent_store_times_out(answers: threading.Event) -> None:
    with pytest.raises(StoreBusy):
        asyncio.run(calls_with(timeout_s=0.01).run(answers.wait))


async def test_abandoned_call_occupies_a_place_until_its_thread_is_free(answers):
    calls, began = calls_with(), threading.Semaphore(0)

    def silent() -> bool:
        began.release()
        return answers.wait()

    left = [asyncio.create_task(calls.run(silent)) for _ in range(ROOM)]
    for _ in range(THREADS):
        assert await asyncio.to_thread(began.acquire, timeout=DEADLINE_S)
    for caller in left:
        caller.cancel()
    await asyncio.wait(left)
    # Only the abandoned calls without a thread have ended.
    others = [asyncio.create_task(calls.run(silent)) for _ in range(ROOM - THREADS)]
    await asyncio.sleep(0)
    with pytest.raises(StoreBusy):
        await calls.run(silent)
    answers.set()
    assert all(await asyncio.gather(*others))
    assert await calls.run(silent)


def fails() -> None:
    raise StoreUnreachable("gone")


def finds_nothing() -> None:
    raise UnknownFile("none")


async def test_failed_store_is_paused_and_logged_once(caplog):
    caplog.set_level("INFO", "tasc_serve.store_calls")
    calls = calls_with(pause_s=0.05)
    for error in (UnknownFile, UnknownFile):
        with pytest.raises(error):
            await calls.run(finds_nothing)
    assert not calls.failing, "an answer that there is nothing is no failure"
    with pytest.raises(StoreUnreachable):
        await calls.run(fails)
    with pytest.raises(StoreBusy):
        await calls.run(lambda: None)
    async with asyncio.timeout(DEADLINE_S):
        while calls.failing:
            with suppress(StoreBusy):
                await calls.run(lambda: None)
            await asyncio.sleep(0.001)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def says_nonsense() -> None:
    raise ValueError("odd")


@pytest.mark.parametrize("answer", [lambda: None, finds_nothing, says_nonsense])
async def test_slow_store_stays_paused_after_a_late_answer(answer):
    timeout_s = 0.2
    calls, ended = calls_with(timeout_s=timeout_s, pause_s=DEADLINE_S), threading.Event()

    def slow() -> None:
        time.sleep(1.5 * timeout_s)
        try:
            answer()
        finally:
            ended.set()

    with pytest.raises(StoreBusy):
        await calls.run(slow)
    assert calls.failing
    assert await asyncio.to_thread(ended.wait, DEADLINE_S)
    await asyncio.sleep(timeout_s / 2)  # until the call has been counted
    assert calls.failing
    with pytest.raises(StoreBusy):
        calls.begin(lambda: None)


async def test_error_in_our_code_does_not_end_the_failing_state() -> None:
    calls = calls_with()
    with pytest.raises(StoreUnreachable):
        await calls.run(fails)
    with refused(ValueError, "odd"):
        await calls.run(says_nonsense)
    assert calls.failing
    with pytest.raises(UnknownFile):
        await calls.run(finds_nothing)
    assert not calls.failing


def test_closed_store_calls_start_no_call_and_cancel_waiting_calls(answers):
    calls, began = calls_with(threads=1, max_waiting=2), threading.Event()

    def silent() -> bool:
        began.set()
        return answers.wait()

    running, waiting = calls.begin(silent), calls.begin(silent)
    assert began.wait(DEADLINE_S)
    calls.close()
    assert waiting.cancelled()
    answers.set()
    assert running.result(DEADLINE_S)
    for _ in range(3):
        with refused(StoreBusy, "shutdown"):
            calls.begin(silent)


def test_repeated_call_survives_failures_and_logs_failures_once(caplog):
    caplog.set_level("INFO", "tasc_serve.store_calls")
    outcomes = [None, StoreUnreachable("away"), ValueError("odd"), None]
    faults: list[str | None] = []
    begun = threading.Event()

    def work() -> None:
        faults.append(repeated.fault if begun.is_set() else None)
        outcome = outcomes.pop(0) if outcomes else None
        if outcome:
            raise outcome

    repeated = RepeatedCall("work", work, 0.01, wait_s=DEADLINE_S)
    begun.set()
    eventually(lambda: len(faults) > 5)
    assert repeated.close(DEADLINE_S)
    assert [fault for fault in faults if fault] == ["away", "odd"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_closed_repeated_call_makes_its_last_call_once() -> None:
    made: list[str] = []
    repeated = RepeatedCall(
        "work", lambda: made.append("work"), DEADLINE_S, last=lambda: made.append("last")
    )
    assert repeated.close(DEADLINE_S)
    assert made == ["work", "last"]


def test_hanging_repeated_call_delays_neither_start_nor_close(answers):
    def hang() -> None:
        answers.wait()

    begun = time.monotonic()
    repeated = RepeatedCall("work", hang, DEADLINE_S, wait_s=0.01)
    assert not repeated.close(0.01)
    assert time.monotonic() - begun < DEADLINE_S / 2
    answers.set()
    assert repeated.close(DEADLINE_S)
