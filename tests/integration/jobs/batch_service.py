"""HTTP endpoints for files and batches over a real Redis, without a model, and their worker."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import uvicorn
from batch_jobs import ENGINE
from openai import OpenAI
from openai.types import Batch
from prometheus_client import CollectorRegistry

from support import DEADLINE_S, eventually
from tasc_jobs.worker.batch_worker import BatchWorker, TaskBackoff
from tasc_jobs.worker.one_batch import Ended, WorkerSettings
from tasc_serve.http.api import create_api
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings


class NoBackend:
    """Batches need no replica to be asked for."""

    tasks: Sequence[str] = ()


@contextmanager
def batch_service(client: redis.Redis, **limits: float) -> Iterator[OpenAI]:
    """The official client of a service that runs for the block."""
    storage = BatchStorage(client)
    app = create_api(
        NoBackend(), LimitSettings(**limits), GatewayMetrics(CollectorRegistry()), storage=storage
    )
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
        ) as openai:
            yield openai
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)


class WorkerRun:
    """Workers of this process for one task's batches, and what they said, ended and counted."""

    def __init__(self, client: redis.Redis, url: str, task: str, work: Path) -> None:
        limits = LimitSettings(max_batch_lines=10_000, max_choices=4)
        self.client, self.task = client, task
        self.settings = WorkerSettings(url, work, ENGINE, limits)
        self.said, self.ended = list[str](), list[Ended]()
        self._registry = CollectorRegistry()
        self._metrics = BatchMetrics(self._registry)

    def worker(self, most_faults: int = 5, **how: Any) -> BatchWorker:
        told = {"metrics": self._metrics, "say": self.said.append, "ended": self.ended.append}
        backoff = TaskBackoff(most_faults, first_s=0.01)
        made = (self.client, self.settings, [self.task])
        return BatchWorker(*made, poll_s=0.01, backoff=backoff, **told, **how)

    def counted(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, {"task": self.task, **labels})

    def left(self) -> list[Path]:
        return list(self.settings.folder.iterdir())


def line(task: str, name: str, said: str, **fields: object) -> str:
    messages = [{"role": "user", "content": said}]
    body = {"model": task, "messages": messages, **fields}
    return request(name, "/v1/chat/completions", body)


def request(name: str, url: str, body: dict[str, object]) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def asked(openai: OpenAI, lines: Sequence[str], endpoint: str = "/v1/chat/completions") -> Batch:
    """A new batch of these lines."""
    file = openai.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")
    return openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def answers(openai: OpenAI, file_id: str | None) -> dict[str, dict]:
    """Lines of an output or error file by their custom_id, which each have once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in openai.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    assert len({each["id"] for each in lines}) == len(lines)
    return found
