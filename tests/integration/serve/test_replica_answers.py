"""A replica answers each request once, and frees its row however the answer ends.

The replica lives in this process and needs Redis only.
"""

import asyncio
import uuid

import pytest
from msgspec import structs
from serving import running_replica

import tiny
from support import completed, eventually_async, refused
from tasc_protocol import Output, Request
from tasc_runtime.errors import EngineBroken
from tasc_runtime.protocol import Refusal

pytestmark = [pytest.mark.redis, pytest.mark.anyio]
PROMPT = tiny.SENTENCES[0]


@pytest.fixture
def replica(redis_url, task, tmp_path):
    limits = {"max_queued_requests": 2}
    with running_replica(
        redis_url, task.record.name, tmp_path, rows=2, length=512, limits=limits
    ) as running:
        yield running


def long_request(**fields):
    return Request(
        uuid.uuid4().hex, PROMPT, 400, templated=True, ignore_eos=True, stream=True, **fields
    )


async def until_free(replica):
    engine = replica.builder.engine
    await eventually_async(lambda: engine.running == engine.waiting == 0)
    assert replica.state().outstanding == 0


async def test_unstreamed_request_has_one_output(replica):
    items = []
    await replica.answer(structs.replace(long_request(), stream=False, max_tokens=30), items.append)
    (item,) = items
    assert (len(item.result.tokens), item.text) == (30, item.result.text)


async def test_timed_out_request_is_refused_and_frees_its_row(replica):
    items = []
    await replica.answer(long_request(timeout_s=0.01), items.append)
    assert (items[-1].kind, items[-1].param) == ("late", None)
    assert all(isinstance(item, Output) and not item.result for item in items[:-1])
    await until_free(replica)


async def test_cancelled_request_frees_its_row(replica):
    items = []
    answering = asyncio.create_task(replica.answer(long_request(), items.append))
    await eventually_async(lambda: any(item.tokens for item in items))
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    received = len(items)
    await until_free(replica)
    assert len(items) == received


async def test_request_whose_outputs_cannot_be_sent_frees_its_row(replica):
    def send(item):
        if item.tokens:
            raise ValueError("too long a message")

    with refused(ValueError, "too long a message"):
        await replica.answer(long_request(), send)
    await until_free(replica)


async def test_replica_refuses_requests_beyond_its_queue_and_answers_queued_requests(replica):
    running = [asyncio.create_task(completed(replica, long_request())) for _ in range(4)]
    await eventually_async(lambda: replica.state().outstanding == 4)
    refusal = await completed(replica, long_request())
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "full"
    assert refusal.retry_after_s > 0
    assert [len(item.result.tokens) for item in await asyncio.gather(*running)] == [400] * 4
    await until_free(replica)


async def test_requests_to_a_broken_engine_raise_an_error(replica, monkeypatch):
    def broken():
        raise RuntimeError("out of order")

    monkeypatch.setattr(replica.builder.engine, "launch", broken)
    for _ in range(2):  # one that was running, and one that comes later
        with refused(EngineBroken, "out of order"):
            await replica.answer(long_request(), lambda item: None)
    with refused(EngineBroken, "out of order"):
        replica.check_health()
