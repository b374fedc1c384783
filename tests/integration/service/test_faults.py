"""Tests disconnecting clients, too many requests, and a killed replica."""

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import ALPHA, BETA, MODEL_LEN, Ask, replica_pids

import tiny
from support import eventually

pytestmark = [pytest.mark.ray, pytest.mark.redis]
LONG = 400
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def long(service):
    """A request with an answer of many steps."""
    asks = (Ask(ALPHA, value, LONG, draft=False) for value in tiny.SENTENCES)
    found = next(one for one in asks if service.expected(one).tokens == LONG)
    assert LONG + len(found.value) < MODEL_LEN
    return found


@pytest.fixture(autouse=True)
def _still_right_afterwards(service):
    yield
    for task in (ALPHA, BETA):
        one = Ask(task, tiny.SENTENCES[1])
        assert service.answer(one) == service.expected(one)


def post(client, service, one, **more):
    return client.post(f"{service.base}{one.path}", json=one.body | more, timeout=TIMEOUT_S)


async def hang_up(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def cut_short(service, one, times, come_and_go):
    """Whether fewer tokens than ``times`` answers were generated when all rows were free again.

    The engine may have been faster than the client that goes away, so it is tried a few times.
    """
    for _ in range(10):
        before = service.metrics().sum("tasc_generation_tokens_total", task=one.task)
        come_and_go()
        eventually(lambda: service.load(one.task) == (0, 0))
        after = service.metrics().sum("tasc_generation_tokens_total", task=one.task)
        if 0 < after - before < times * one.max_tokens:
            return True
    return False


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_frees_rows_and_places_in_the_queue(service, long, stream):
    # Enough clients that the service cannot have answered all before they disconnect.
    crowd = service.settings.engine.rows + service.settings.limits.max_queued_requests

    async def crowd_comes_and_goes():
        async with httpx.AsyncClient() as client:
            coming = (post(client, service, long, stream=stream) for _ in range(crowd))
            tasks = [asyncio.ensure_future(c) for c in coming]
            while not any(t.done() for t in tasks):
                if all(await asyncio.to_thread(service.load, ALPHA)):
                    break
            await hang_up(tasks)

    assert cut_short(service, long, crowd, lambda: asyncio.run(crowd_comes_and_goes()))


@pytest.mark.parametrize("prompts", [1, 14])
def test_who_goes_away_in_mid_stream_frees_the_rows(service, long, prompts):
    body = long.body | {"stream": True}
    if prompts > 1:
        body["prompt"] = [long.value] * prompts

    def read_one_piece():
        url = f"{service.base}{long.path}"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
            assert response.status_code == 200
            assert next(response.iter_lines()).startswith("data: {")

    assert cut_short(service, long, prompts, read_one_piece)


def test_what_finds_no_place_is_told_to_come_again(service, long):
    places = service.settings.engine.rows + service.settings.limits.max_queued_requests

    async def overfill():
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
            coming = [post(client, service, long, stream=i % 2 == 0) for i in range(places + 6)]
            tasks = [asyncio.ensure_future(c) for c in coming]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            one = Ask(BETA, tiny.SENTENCES[0])
            assert await asyncio.to_thread(service.answer, one) == service.expected(one)
            await hang_up(pending)
            return [t.result() for t in done]

    refused = asyncio.run(overfill())
    assert refused
    for response in refused:
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("service_full", "server_error")
    eventually(lambda: service.load(ALPHA) == (0, 0))


def ended_well(service, one, response):
    """Whether the response is the complete right answer, or an error that allows a retry."""
    if response.status_code != 200:
        return response.status_code in (503, 504) and "error" in response.json()
    if not one.body["stream"]:
        return response.json()["choices"][0]["text"] == service.expected(one).text
    *lines, last = response.text.strip().split("\n\n")
    data = [line for line in lines if not line.startswith(":")]  # comments keep a stream alive
    events = [json.loads(line.removeprefix("data: ")) for line in data]
    text = "".join(e["choices"][0]["text"] for e in events if "choices" in e)
    whole = service.expected(one).text
    ok = text == whole if "choices" in events[-1] else whole.startswith(text)
    return ok and last == "data: [DONE]"


@pytest.mark.slow("kills a replica; a daily test kills one of two")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's /proc")
def test_a_killed_replica_is_replaced_and_nobody_waits_in_vain(service, long):
    (pid,) = replica_pids(ALPHA)
    asks = [Ask(ALPHA, long.value, LONG, stream=i % 2 == 0, draft=False) for i in range(6)]
    with httpx.Client() as client, ThreadPoolExecutor(len(asks)) as pool:
        coming = [pool.submit(post, client, service, one) for one in asks]
        eventually(lambda: service.load(ALPHA)[0] > 0)
        os.kill(pid, signal.SIGKILL)
        responses = [c.result() for c in coming]
    for one, response in zip(asks, responses, strict=True):
        assert ended_well(service, one, response), response.text
    one = Ask(ALPHA, tiny.SENTENCES[0])
    eventually(lambda: httpx.get(f"{service.base}/readyz", timeout=30).status_code == 200)
    assert service.answer(one) == service.expected(one)
    assert pid not in replica_pids(ALPHA)
