"""One running service for all tests of this folder: two tasks, one corpus, two tokenizers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from openai import OpenAI
from ray import serve
from serving import ADAPTERS, ALPHA, BETA, MODEL_LEN, PAGE, Service, Task, make_task

import tiny
from lora_folders import make_adapter
from tasc_jobs.index.build import build_and_publish
from tasc_serve import app
from tasc_serve.settings import ServeSettings
from tasc_store import CorpusRow, CorpusStore, TaskStore, connect

# Limits so low that a test can fill every place with long requests.
ROWS, QUEUED = 4, 10


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    made = {name: make_task(tmp_path_factory.mktemp(name), name) for name in (ALPHA, BETA)}
    base = Path(made[BETA].record.model)
    places = [(name, str(make_adapter(base, base / name, **how))) for name, how in ADAPTERS.items()]
    record = replace(made[BETA].record, adapters=tuple(places))
    return {**made, BETA: replace(made[BETA], record=record)}


@pytest.fixture(scope="session")
def indexed(redis_url: str, ray_cluster: None, tasks: dict[str, Task]) -> str:
    """A store with both tasks, the one corpus and an index of it for either tokenizer; its URL."""
    with connect(redis_url) as client:
        CorpusStore(client, ALPHA).append(
            [
                CorpusRow(
                    f"{name} {value}", value, task.plain(task.prompt(value, chat=True), 24).text
                )
                for name, task in tasks.items()
                for value in tiny.SENTENCES
            ]
        )
        for task in tasks.values():
            TaskStore(client).put(task.record)
            build_and_publish(redis_url, task.record)
    return redis_url


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServeSettings:
    light = {"num_cpus": 0.1}  # other tests may want the cluster's logical CPUs meanwhile
    return ServeSettings.model_validate(
        {
            "tasks": [{"name": ALPHA, **light}, {"name": BETA, **light, "replicas": 2}],
            "http": {"port": 0, "gateway_num_cpus": 0.1, "cors_origins": [PAGE]},
            "engine": {
                "rows": ROWS,
                "max_model_len": MODEL_LEN,
                "prefill_chunk": 16,
                "cost_aware": False,  # so that drafts do not depend on speed
            },
            "limits": {
                "max_queued_requests": QUEUED,
                "request_timeout_s": 60,
                "drain_timeout_s": 1,
            },
            "failover": {"heartbeat_timeout_s": 2, "max_retries": 5},
            "metrics": {"ttl_s": 3},
            "poll_interval_s": 0.2,
            "cache_dir": Path(tmp_path_factory.mktemp("cache")),
        }
    )


@pytest.fixture(scope="package")
def service(indexed: str, settings: ServeSettings, tasks: dict[str, Task]) -> Iterator[Service]:
    """The service, which ends with the last of these tests; idle, it takes a third of a core."""
    base = app.start(settings, indexed)
    yield Service(base, indexed, settings, tasks)
    serve.shutdown()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[OpenAI]:
    """The official client of the service."""
    with service.client() as client:
        yield client
