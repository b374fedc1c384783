"""Tests that changed draft settings change drafts, but not the answers in progress.

Workers and replicas live in this process and need Redis only.
"""

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import generate_latest
from serving import Samples, Task, publish, running_replica

import tiny
from proposer_integrity import check_rows
from support import DEADLINE_S, completed, eventually, index_of
from tasc_draft import DraftIndex, DraftSettings
from tasc_engine import GenerationResult
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
def worker(
    client: redis.Redis, record: TaskRecord, indexes: ArtifactStore, tmp_path: Path
) -> EngineBuilder:
    return EngineBuilder.of_task(client, record.name, EngineSettings(**ENGINE), cache_dir=tmp_path)


@pytest.fixture
def replica(
    redis_url: str, record: TaskRecord, indexes: ArtifactStore, tmp_path: Path
) -> Iterator[TaskReplica]:
    with running_replica(redis_url, record.name, tmp_path) as running:
        yield running


def call(prompt: str) -> Request:
    return Request(uuid.uuid4().hex, prompt, templated=True)


@pytest.mark.parametrize("settings", [OFF, SHORT, TASC], ids=["off", "short", "tasc"])
def test_rows_in_flight_go_on_as_they_would_and_are_drafted_for_otherwise(
    worker: EngineBuilder, record: TaskRecord, expected: Any, settings: DraftSettings
) -> None:
    asked = {prompt: worker.reader.request(call(prompt)) for prompt in PROMPTS}
    for request in asked.values():
        worker.engine.submit(request)
    changed = replace(record, draft=settings)
    found: dict[str, GenerationResult] = {}
    for step in range(200):
        if step == 2:
            assert not found, "all rows are in flight"
            worker.take(changed, 2, worker.proposer_for(changed, worker.proposer.index))
            check_rows(worker.proposer)
        found |= {d.id: d.result for d in worker.engine.step() if d.result}
    assert {p: found[request.id].tokens for p, request in asked.items()} == expected
    most = settings.num_speculative_tokens
    drafted = [result.acceptance.drafted for result in found.values()]
    assert any(n > 2 for own in drafted for n in own[:2]), "by the settings of before"
    if settings == TASC:
        assert any(sum(own[2:]) for own in drafted), "after the change, from where rows were"
    else:
        assert all(n <= most for own in drafted for n in own[2:])
        assert any(own[2:] for own in drafted)


def test_settings_of_the_record_count_once_the_index_has_none_of_its_own(
    worker: EngineBuilder, record: TaskRecord, index: DraftIndex
) -> None:
    changed, tuned = replace(record, draft=SHORT), replace(index, settings=OFF)
    assert worker.artifact is not None
    worker.swap(worker.artifact, tuned, worker.proposer_for(worker.record, tuned))
    assert worker.proposer_for(changed, tuned) is None
    worker.take(changed, 2)
    assert (worker.proposer.settings, worker.proposer.index) == (OFF, tuned)
    made = worker.proposer_for(changed, index)
    worker.swap(worker.artifact, index, made)
    assert (worker.proposer, made.settings, made.index) == (made, SHORT, index)


def test_an_index_that_could_not_be_installed_is_tried_again(
    replica: TaskReplica, indexes: ArtifactStore, index: DraftIndex, monkeypatch: Any
) -> None:
    worker, real = replica.builder, replica.builder.swap
    refused = []

    def swap(*values: Any) -> None:
        if not refused:
            refused.append(values)
            raise RuntimeError("no row could be drafted for")
        real(*values)

    monkeypatch.setattr(worker, "swap", swap)
    publish(indexes, replace(index, settings=SHORT))
    eventually(lambda: worker.artifact is not None and worker.artifact.version == 2)
    assert refused


@pytest.mark.anyio
async def test_under_load_answers_are_equal_and_what_is_counted_names_who_drafts(
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


def test_an_index_tuned_to_what_it_cannot_be_drafted_by_leaves_the_old_one(
    replica: TaskReplica, indexes: ArtifactStore, index: DraftIndex, monkeypatch: Any, caplog: Any
) -> None:
    def fails(record: TaskRecord, index: DraftIndex) -> None:
        raise ValueError("sorted by too few tokens")

    worker = replica.builder
    with monkeypatch.context() as patched:
        patched.setattr(worker, "proposer_for", fails)
        publish(indexes, replace(index, settings=TASC))
        eventually(lambda: "does not fit; the old one stays in use" in caplog.text)
    assert worker.artifact is not None
    assert worker.artifact.version == 1
    publish(indexes, replace(index, settings=SHORT))
    eventually(lambda: worker.artifact is not None and worker.artifact.version == 3)
    assert worker.proposer.settings == SHORT
