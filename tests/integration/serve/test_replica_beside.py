"""Tests the other work of a replica: shadow checks, collection of answers, index metrics.

The replica lives in this process and needs Redis only.
"""

import asyncio
import itertools
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from serving import Samples, publish, running_replica

import tiny
from support import completed, eventually, eventually_async, index_of, lying
from tasc_protocol import Output, Request
from tasc_runtime.protocol import Refusal
from tasc_serve.replica.replica import TaskReplica
from tasc_store import CollectedRow, CollectedRows, EmbeddedRedis, TaskStore, connect

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

    def ask(self, value, **changes):
        call = Request(uuid.uuid4().hex, value, templated=True)
        return completed(self.running, structs.replace(call, **changes))

    async def answers(self, **changes):
        """Returns the answer to each prompt; all requests are sent at once."""
        found = await asyncio.gather(*(self.ask(value, **changes) for value in PROMPTS))
        assert all(isinstance(answer, Output) for answer in found)
        return [answer.result for answer in found]

    async def refusal_of_a_full_house(self, places):
        """Returns the refusal of one more request after some of those in all places have ended."""
        values = itertools.cycle(PROMPTS)
        running = {asyncio.ensure_future(self.ask(next(values))) for _ in range(places)}
        ended = 0
        while True:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            ended += len(done)
            running |= {asyncio.ensure_future(self.ask(next(values))) for _ in done}
            await asyncio.sleep(0)
            more = await self.ask(next(values))
            if isinstance(more, Refusal) and ended > 2:
                await asyncio.gather(*running)
                return more

    def sum(self, name, **labels):
        return Samples(generate_latest(self.running.registry).decode()).sum(name, **labels)


@pytest.fixture
def start(redis_url, task, tmp_path):
    with ExitStack() as running:

        def start(url=redis_url, limits=None, **own):
            own = {"draft": {"recent_tokens": 0}, **own}
            replica = running_replica(url, task.record.name, tmp_path, own=own, limits=limits or {})
            return Replica(running.enter_context(replica))

        yield start


def expected(task):
    found = []
    for value in PROMPTS:
        said = task.plain(task.prompt(value, chat=True), task.record.max_tokens)
        found.append((said.text, said.reason))
    return found


async def test_every_drafted_answer_is_checked_and_users_notice_nothing(start, task, store, index):
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


async def test_a_replica_whose_engine_lies_about_drafts_says_so(
    start, task, store, index, monkeypatch, caplog
):
    publish(store, index)
    lying(monkeypatch, task.tokenizer.vocab_size)
    replica = start(shadow={"sample_rate": 1.0, "max_age_s": 300})
    results = await replica.answers()
    wrong = sum((r.text, r.finish_reason) != want for r, want in
                zip(results, expected(task), strict=True))  # fmt: skip
    assert wrong > len(PROMPTS) // 2
    await eventually_async(lambda: replica.sum("tasc_lossless_checks_total") == len(PROMPTS))
    assert replica.sum("tasc_lossless_mismatches_total", kind="real") >= wrong
    assert any("differs" in record.getMessage() for record in caplog.records)
    assert not any(sentence in caplog.text for sentence in tiny.SENTENCES)


async def test_a_share_of_the_finished_answers_is_collected(start, task, client):
    texts = [text for text, _ in expected(task)]
    characters = {c for text in texts for c in text[1:]} - {c for text in texts for c in text[:1]}
    stop = max(characters, key=lambda c: min(sum(c in t for t in texts), len(texts) - 1))
    TaskStore(client).put(replace(task.record, stop=(stop,)))
    replica = start(collect={"sample_rate": 1.0, "flush_interval_s": 0.05})
    results = await replica.answers()
    await replica.answers(templated=False)
    kept = [
        CollectedRow(value, result.text)
        for value, result in zip(PROMPTS, results, strict=True)
        if result.finish_reason == "stop" and result.text.strip()
    ]
    assert 0 < len(kept) < len(PROMPTS)
    eventually(lambda: replica.sum("tasc_collected_rows_total") == len(kept))
    found = CollectedRows(client, task.record.name).read().rows
    assert sorted(found, key=str) == sorted(kept, key=str)


async def test_a_store_that_goes_away_costs_collected_answers_only(start, task):
    with EmbeddedRedis.start() as own:
        with connect(own.url) as client:
            TaskStore(client).put(task.record)
        replica = start(own.url, collect={"sample_rate": 1.0, "flush_interval_s": 0.05})
    results = await replica.answers()
    assert [(r.text, r.finish_reason) for r in results] == expected(task)
    assert replica.sum("tasc_collected_rows_total") == 0
