"""Each request is answered by the adapter of its task that it names; it needs Redis only."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from serving import Task, make_task

import tiny
from lora_folders import make_adapter
from tasc_engine.model.loading import ModelSource, load_model
from tasc_runtime.engine.builder import EngineBuilder
from tasc_runtime.engine_settings import EngineSettings
from tasc_runtime.protocol import Call
from tasc_runtime.sampling_options import FieldError, SamplingOptions
from tasc_store import TaskStore, connect

pytestmark = pytest.mark.redis
ENGINE = EngineSettings(rows=4, max_model_len=128, device="cpu", cost_aware=False)
FIRST, SECOND = NAMES = ("z-first", "a.second")  # the first in order, not by name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("model")
    task = make_task(folder, "alpha")
    adapters = tuple(
        (name, str(make_adapter(folder, tmp_path_factory.mktemp("adapter"), seed)))
        for seed, name in enumerate(NAMES)
    )
    name = f"adapted-{uuid.uuid4().hex}"
    return replace(task, record=replace(task.record, name=name, corpus=None, adapters=adapters))


@pytest.fixture(scope="module")
def worker(
    made: Task, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineBuilder]:
    with connect(redis_url) as client:
        TaskStore(client).put(made.record)
        cache = tmp_path_factory.mktemp("cache")
        yield EngineBuilder.of_task(client, made.record.name, ENGINE, cache_dir=cache)


def call(number: int, value: str, adapter: str | None) -> Call:
    return Call(str(number), value, templated=True, options=SamplingOptions(adapter=adapter))


def test_rows_of_one_batch_are_answered_as_by_their_own_merged_models(
    made: Task, worker: EngineBuilder
) -> None:
    base = Path(made.record.model)
    merged = {
        name: load_model(ModelSource(base, Path(folder), dtype="float64"))
        for name, folder in made.record.adapters
    }
    merged[None] = merged[FIRST]
    asked = [(value, name) for value in tiny.SENTENCES[:3] for name in (SECOND, None, FIRST)]
    requests = [worker.request(call(i, *each)) for i, each in enumerate(asked)]
    found = {int(result.id): result.text for result in worker.engine.generate(requests)}
    expected = []
    for value, name in asked:
        tokens = tiny.plain(merged[name], made.prompt(value, chat=True), 24)
        expected.append(made.tokenizer.decode(tokens))
    assert [found[i] for i in range(len(asked))] == expected
    assert expected[0] != expected[1]
    assert expected[0] != made.plain(made.prompt(asked[0][0], chat=True), 24).text


def test_an_adapter_the_task_has_not_is_refused_by_name(worker: EngineBuilder) -> None:
    with pytest.raises(FieldError) as refused:
        worker.request(call(1, "x", "gone"))
    assert refused.value.field == "adapter"
