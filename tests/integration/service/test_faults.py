"""Tests disconnecting clients, too many requests, and a killed replica."""

import asyncio

import httpx
import pytest
from serving import ALPHA, BETA, MODEL_LEN, Ask

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
def test_disconnected_clients_free_rows_and_queue_places(service, long, stream):
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
def test_client_that_disconnects_during_a_stream_frees_its_rows(service, long, prompts):
    body = long.body | {"stream": True}
    if prompts > 1:
        body["prompt"] = [long.value] * prompts

    def read_one_piece():
        url = f"{service.base}{long.path}"
        with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as response:
            assert response.status_code == 200
            assert next(response.iter_lines()).startswith("data: {")

    assert cut_short(service, long, prompts, read_one_piece)
