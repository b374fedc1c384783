"""Batch jobs with a tiny model, in this process or in one that can be killed; batches over HTTP."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import redis
import torch
import uvicorn
from openai import OpenAI
from openai.types import Batch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

import support
import tiny
from support import DEADLINE_S, eventually
from tasc_draft.files import data_folder
from tasc_jobs.worker.batch_worker import BatchWorker, TaskBackoff
from tasc_jobs.worker.one_batch import Ended, WorkerSettings
from tasc_runtime.engine_settings import EngineSettings
from tasc_serve.http.api import create_api
from tasc_serve.http.batches.files_api import BatchStorage
from tasc_serve.metrics.batch_metrics import BatchMetrics
from tasc_serve.metrics.gateway_metrics import GatewayMetrics
from tasc_serve.settings import LimitSettings
from tasc_store import TaskRecord
from tasc_text import TaskTokenizer

ENGINE = EngineSettings(rows=8, max_model_len=64, cost_aware=False)
MAX_TOKENS = 12
FILES = str(data_folder() / "files")  # the same for all tests of one Redis
_DRIVER = """
import os, signal, sys
from pathlib import Path
from tasc_jobs.batch import job
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.ray_local import local_ray
from tasc_runtime.engine_settings import EngineSettings
url, task, source, output, least = sys.argv[1:]
engine = EngineSettings(rows=8, max_model_len=64, cost_aware=False)
def on_progress(found):
    if found.engines and found.report.rows >= int(least):
        print(found.report.rows, flush=True)
        for victim in sys.stdin.readline().split():
            os.kill(int(victim) or os.getpid(), signal.SIGKILL)
job._REPORT_S = 0.0  # else the job may end between two reports
with local_ray(object_store_mb=100):
    generate(url, task, Source.of(source), Path(output), engine=engine, progress=on_progress)
"""


def record_of(task: str, folder: Path, **fields: object) -> TaskRecord:
    fields |= {"dtype": "float64", "max_tokens": MAX_TOKENS, "draft": support.EAGER}
    return support.record_of(folder, task, "say {input}\n", **fields)


def expected(folder: Path, inputs: Sequence[str]) -> list[list[int]]:
    """Returns the model's answer to each input alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = TaskTokenizer.from_folder(folder)
    prompts = [tokenizer.encode_prompt(f"say {text}\n") for text in inputs]
    return [tiny.plain(model, prompt, MAX_TOKENS) for prompt in prompts]


def rows(count: int) -> list[object]:
    said = (f"wake me at {i} " + "please " * (i % 5) for i in range(count))
    return [{"id": f"r{i}", "input": text} for i, text in enumerate(said)]


@contextmanager
def driver(
    url: str, task: str, source: Path, output: Path, *, least: int, own_ray: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that runs the job, on this process's Ray or its own, up to ``least`` rows.

    It then waits until `tell` sends the processes to kill.
    """
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    if not own_ray:
        env["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    args = [url, task, str(source), str(output), str(least)]
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, *args],
        env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rows_done(process: subprocess.Popen[str]) -> int:
    """Returns how many rows a driver has finished when it first waits for `tell`."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip().isdigit(), process.communicate()
    return int(line)


def kill_itself(process: subprocess.Popen[str]) -> None:
    process.communicate("0\n", timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL


def kill_others(process: subprocess.Popen[str], victims: Sequence[int]) -> str:
    """Makes a driver kill other processes and continue; returns its output up to its end."""
    _, err = process.communicate(" ".join(map(str, victims)) + "\n", timeout=DEADLINE_S)
    return err


@contextmanager
def batch_service(client: redis.Redis, **limits: float) -> Iterator[OpenAI]:
    """Runs a service for the block; yields its official client."""
    storage = BatchStorage(client, FILES)
    metrics = GatewayMetrics(CollectorRegistry())
    backend = SimpleNamespace(tasks=())  # batches need no replica
    app = create_api(backend, LimitSettings(**limits), metrics, storage=storage)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as openai:
            yield openai
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)


class WorkerRun:
    """Workers of this process for one task's batches, with their messages, results and metrics."""

    def __init__(self, client: redis.Redis, url: str, task: str, work: Path) -> None:
        limits = LimitSettings(max_batch_lines=10_000, max_choices=4)
        self.client, self.task = client, task
        self.settings = WorkerSettings(url, work, FILES, ENGINE, limits)
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
    file = openai.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")
    return openai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def answers(openai: OpenAI, file_id: str | None) -> dict[str, dict]:
    """Returns the lines of an output or error file by their custom_id, which is unique."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in openai.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    assert len({each["id"] for each in lines}) == len(lines)
    return found
