"""Tests that changed draft settings change drafts, but not the answers in progress.

Workers and replicas live in this process and need Redis only.
"""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from prometheus_client import generate_latest
from serving import Samples, Task, publish, running_replica

import tiny
from support import DEADLINE_S, completed, index_of
from tasc_draft import DraftIndex, DraftSettings
from tasc_protocol import Output, Request
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_serve.replica.replica import TaskReplica
from tasc_store import ArtifactStore, TaskRecord, TaskStore

pytestmark = pytest.mark.redis
ENGINE = {"rows": 4, "max_model_len": 128, "device": "cpu", "cost_aware": False}
MOST = 40  # maximum tokens of an answer
PROMPTS = tiny.SENTENCES[:4]
OFF = DraftSettings(num_speculative_tokens=0)
SHORT = DraftSettings(num_speculative_tokens=2, min_prob=0.0)
TASC = DraftSettings(mixture="tasc", min_prob=0.0)


@pytest.fixture(scope="module")
def expected(made: Task) -> dict[str, tuple[int, ...]]:
    prompts = {p: made.prompt(p, chat=True) for p in PROMPTS}
    return {p: tuple(tiny.plain(made.model, ids, MOST)) for p, ids in prompts.items()}


@pytest.fixture(scope="module")
def index(made: Task, expected: dict[str, tuple[int, ...]]) -> DraftIndex:
    """The index of all expected answers."""
    return index_of(made.tokenizer, list(expected.values()))


@pytest.fixture
def record(client: redis.Redis, made: Task) -> TaskRecord:
    name = f"drafted-{uuid.uuid4().hex}"
    given = replace(made.record, name=name, corpus=None, max_tokens=MOST)
    TaskStore(client).put(given)
    return given


@pytest.fixture
def indexes(client: redis.Redis, record: TaskRecord, index: DraftIndex) -> ArtifactStore:
    store = ArtifactStore(client, record.name, record.fingerprint)
    publish(store, index)
    return store


@pytest.fixture
def worker(client, record, indexes, tmp_path) -> EngineBuilder:
    return EngineBuilder.of_task(client, record.name, EngineSettings(**ENGINE), cache_dir=tmp_path)


@pytest.fixture
def replica(redis_url, record, indexes, tmp_path) -> Iterator[TaskReplica]:
    with running_replica(redis_url, record.name, tmp_path) as running:
        yield running


def call(prompt: str) -> Request:
    return Request(uuid.uuid4().hex, prompt, templated=True)


def test_index_draft_settings_override_record_draft_settings(worker, record, index) -> None:
    changed, tuned = replace(record, draft=SHORT), replace(index, settings=OFF)
    assert worker.artifact is not None
    worker.swap(worker.artifact, tuned, worker.proposer_for(worker.record, tuned))
    assert worker.proposer_for(changed, tuned) is None
    worker.take(changed, 2)
    assert (worker.proposer.settings, worker.proposer.index) == (OFF, tuned)
    made = worker.proposer_for(changed, index)
    worker.swap(worker.artifact, index, made)
    assert (worker.proposer, made.settings, made.index) == (made, SHORT, index)


@pytest.mark.anyio
async def test_answers_are_equal_while_draft_settings_change_under_load(
    replica: TaskReplica, client: redis.Redis, record: TaskRecord, indexes: ArtifactStore,
    index: DraftIndex, expected: Any,
) -> None:  # fmt: skip
    labels = {"task": record.name}
    enough = asyncio.Event()

    def samples() -> Samples:
        return Samples(generate_latest(replica.registry).decode())

    def drafting(proposer: str) -> float:
        name = "tasc_spec_decode_num_draft_tokens_total"
        return samples().sum(name, proposer=proposer, **labels)

    async def ask(prompt: str) -> None:
        while not enough.is_set():
            found = await completed(replica, call(prompt))
            assert isinstance(found, Output), found
            assert found.result.tokens == expected[prompt]

    async def change() -> None:
        while not drafting("mixed"):
            await asyncio.sleep(0.01)
        TaskStore(client).put(replace(record, draft=TASC))
        while not drafting("tasc"):
            await asyncio.sleep(0.01)
        publish(indexes, replace(index, settings=SHORT))  # tuned settings override the record
        before = drafting("mixed")
        while drafting("mixed") == before:
            await asyncio.sleep(0.01)
        enough.set()

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(change(), *map(ask, PROMPTS))
    found = samples()
    for gauge in ("tasc_draft_index_info", "tasc_draft_index_built_timestamp_seconds"):
        assert found.sum(gauge, proposer="mixed", **labels) > 0, gauge
        assert found.sum(gauge, proposer="tasc", **labels) == 0, gauge
    assert found.sum("tasc_draft_index_info", version=2, **labels) == 1
    assert found.sum("tasc_draft_index_info", **labels) == 1
    assert found.sum("tasc_index_swaps_total", **labels) == 1
    assert found.sum("tasc_draft_failures_total", **labels) == 0
