"""The HTTP endpoints for files and batches over a real Redis, without a model behind them."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis
import uvicorn
from openai import OpenAI
from openai.types import Batch
from prometheus_client import CollectorRegistry

from support import eventually
from tasc_serve.http.api import create_api
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings

DEADLINE_S = 240  # only ends a broken test


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
