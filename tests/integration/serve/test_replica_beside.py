"""Tests the other work of a replica: shadow checks, collection of answers, index metrics.

The replica lives in this process and needs Redis only.
"""

import asyncio
import uuid
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from prometheus_client import generate_latest
from serving import Samples, publish, running_replica

import tiny
from support import completed, eventually_async, index_of
from tasc_protocol import Output, Request
from tasc_serve.replica.replica import TaskReplica
from tasc_store import EmbeddedRedis, TaskStore, connect

pytestmark = [pytest.mark.redis, pytest.mark.anyio]
PROMPTS = [f"{sentence} {i}" for sentence in tiny.SENTENCES for i in range(4)]


@pytest.fixture
def index(task):
    """The index of all answers that will be requested."""
    answers = [
        tiny.plain(task.model, task.prompt(value, chat=True), task.record.max_tokens)
        for value in PROMPTS
    ]
    return index_of(task.tokenizer, answers)


@dataclass(frozen=True)
class Replica:
    """A replica, its answers and its metrics."""

    running: TaskReplica

    async def answers(self):
        """Returns the answer to each prompt; all requests are sent at once."""
        calls = [Request(uuid.uuid4().hex, value, templated=True) for value in PROMPTS]
        found = await asyncio.gather(*(completed(self.running, call) for call in calls))
        assert all(isinstance(answer, Output) for answer in found)
        return [answer.result for answer in found]

    def sum(self, name, **labels):
        return Samples(generate_latest(self.running.registry).decode()).sum(name, **labels)


@pytest.fixture
def start(redis_url, task, tmp_path):
    with ExitStack() as running:

        def start(url=redis_url, **own):
            own = {"draft": {"recent_tokens": 0}, **own}
            replica = running_replica(url, task.record.name, tmp_path, own=own)
            return Replica(running.enter_context(replica))

        yield start


def expected(task):
    found = []
    for value in PROMPTS:
        plain = task.plain(task.prompt(value, chat=True), task.record.max_tokens)
        found.append((plain.text, plain.reason))
    return found


async def test_shadow_checks_cover_every_drafted_answer_and_change_no_answer(
    start, task, store, index
):
    publish(store, index)
    replica = start(shadow={"sample_rate": 1.0, "max_age_s": 300})
    results = await replica.answers()
    assert [(r.text, r.finish_reason) for r in results] == expected(task)
    drafted = sum(any(r.acceptance.drafted) for r in results)
    assert drafted == len(PROMPTS)
    await eventually_async(lambda: replica.sum("tasc_lossless_checks_total") == drafted)
    assert replica.sum("tasc_lossless_mismatches_total") == 0
    row_steps = sum(r.acceptance.steps for r in results)
    assert replica.sum("tasc_row_steps_total") == row_steps
    assert replica.sum("tasc_generation_tokens_total") == sum(len(r.tokens) for r in results)
    assert replica.sum("tasc_e2e_request_latency_seconds_count") == len(PROMPTS)


async def test_store_outage_loses_only_collected_answers(start, task):
    with EmbeddedRedis.start() as own:
        with connect(own.url) as client:
            TaskStore(client).put(task.record)
        replica = start(own.url, collect={"sample_rate": 1.0, "flush_interval_s": 0.05})
    results = await replica.answers()
    assert [(r.text, r.finish_reason) for r in results] == expected(task)
    assert replica.sum("tasc_collected_rows_total") == 0
