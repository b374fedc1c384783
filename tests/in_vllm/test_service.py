"""The service with ``backend: vllm`` over HTTP, and batch jobs, on the demo's model."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="the service needs Ray, which this environment does not have")

import ray
from ray import serve
from serving import Samples, replica_pids

from killable import pids
from support import DEADLINE_S, eventually, read_rows, write_rows
from tasc_draft import DraftSettings
from tasc_jobs.batch.inputs import job_folder
from tasc_jobs.index.build import build_and_publish
from tasc_jobs.ray_local import local_ray
from tasc_serve import LLM, app
from tasc_serve.http.ray_proxy import environment
from tasc_serve.settings import HttpSettings, ServeSettings
from tasc_store import CorpusRow, CorpusStore, EmbeddedRedis, TaskRecord, TaskStore, connect
from tasc_text import TaskTokenizer

DEMO = Path(__file__).parents[2] / "pipelines" / "tasc_jobs" / "demo"
MODEL = DEMO / "tasc-demo-7m"
TASK, ROWS = "intents", 4
ENGINE: dict[str, Any] = {
    "backend": "vllm",
    "vllm": {"enforce_eager": True},
    "rows": ROWS,
    "max_model_len": 512,
}
LONG = 300


@dataclass(frozen=True)
class Running:
    """The service, and its store."""

    base: str
    redis_url: str
    record: TaskRecord

    def post(self, **body: Any) -> httpx.Response:
        body = {"model": TASK, **body}
        return httpx.post(f"{self.base}/v1/completions", json=body, timeout=DEADLINE_S)

    def text(self, prompt: str, **more: Any) -> str:
        response = self.post(prompt=prompt, **more)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def metrics(self) -> Samples:
        return Samples(httpx.get(f"{self.base}/metrics", timeout=30).raise_for_status().text)


@pytest.fixture(scope="module")
def job_rows() -> list[CorpusRow]:
    with gzip.open(DEMO / "data" / "massive_en.train.jsonl.gz", "rt", encoding="utf-8") as lines:
        read = [json.loads(line) for _, line in zip(range(2000), lines, strict=False)]
    return [CorpusRow(row["id"], row["input"], row["output"]) for row in read]


@pytest.fixture(scope="module")
def rows(job_rows: list[CorpusRow]) -> list[CorpusRow]:
    return job_rows[:400]


@pytest.fixture(scope="module")
def service(rows: list[CorpusRow], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    record = TaskRecord(
        name=TASK,
        model=str(MODEL),
        fingerprint=TaskTokenizer.from_folder(MODEL).fingerprint,
        template="{input}",
        max_tokens=32,
        draft=DraftSettings(min_prob=0.05),
    )
    task = {"name": TASK, "replicas": 2, "num_cpus": 0.1, "engine": ENGINE}
    settings = ServeSettings.model_validate(
        {
            "tasks": [task],
            "http": {"port": 0, "gateway_num_cpus": 0.1},
            "limits": {"start_timeout_s": 900, "drain_timeout_s": 1, "max_tokens": 512},
            "failover": {"heartbeat_timeout_s": 5, "max_retries": 5},
            "metrics": {"ttl_s": 5},
            "poll_interval_s": 0.2,
            "cache_dir": tmp_path_factory.mktemp("cache"),
        }
    )
    own = partial(environment, HttpSettings())
    with EmbeddedRedis.start() as server, local_ray(2, 150, own):
        with connect(server.url) as client:
            TaskStore(client).put(record)
            CorpusStore(client, TASK).append(rows[:200])
        build_and_publish(server.url, record)
        yield Running(app.start(settings, server.url), server.url, record)
        serve.shutdown()


@pytest.fixture(scope="module")
def inputs(rows: list[CorpusRow]) -> list[str]:
    return [row.input for row in rows[200:240]]


@pytest.fixture(scope="module")
def expected(inputs: list[str]) -> list[str]:
    """The answers of our engine, which are those of the model."""
    llm = LLM(MODEL, rows=ROWS, max_model_len=512, max_tokens=32, cost_aware=False)
    return [answer.text for answer in llm.generate(inputs)]


def test_drafted_answers_over_http_are_those_of_our_engine(
    service: Running, inputs: list[str], expected: list[str]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(partial(service.text, max_tokens=32), inputs))
    assert texts == expected
    found, own = service.metrics(), {"task": TASK, "source": "vllm"}
    drafts, accepted = (
        [found.sum(f"tasc_spec_decode_num_{name}_total", position=i, **own) for i in range(16)]
        for name in ("drafts_per_pos", "accepted_tokens_per_pos")
    )
    assert drafts == sorted(drafts, reverse=True)
    assert all(n <= of for n, of in zip(accepted, drafts, strict=True))
    assert 0 < sum(accepted) < sum(drafts)
    assert sum(drafts) == found.sum("tasc_spec_decode_num_draft_tokens_total", **own)
    tokens, steps, bonus = (
        found.sum(f"tasc_{name}_total", task=TASK)
        for name in ("generation_tokens", "row_steps", "bonus_tokens")
    )
    assert tokens == sum(accepted) + bonus
    assert 0 < bonus <= steps < tokens  # an accepted end of sequence has no bonus token
    assert found.sum("tasc_request_success_total", task=TASK) == len(inputs)
    assert found.sum("tasc_draft_seconds_sum", task=TASK) > 0


def test_fields_that_vllm_refuses_are_refused_by_name(service: Running) -> None:
    for field, more in {
        "min_p": {"min_p": 0.1, "temperature": 1.0},
        "logit_bias": {"logit_bias": {"5": 1.0}},
        "temperature": {"temperature": 0.001},
        "guided_json": {"guided_json": {"type": "nonsense"}},
    }.items():
        response = service.post(prompt="play some jazz", **more)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), error


def test_guides_logprobs_and_several_answers(service: Running) -> None:
    choices = ["play music", "set an alarm", "tell the news"]
    assert service.text("play some jazz", guided_choice=choices) in choices
    assert service.text("play", guided_json={"type": "boolean"}) in ("true", "false")
    body = service.post(prompt="play some jazz", logprobs=2, echo=True, max_tokens=4).json()
    found = body["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"])
    assert found["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in found["token_logprobs"][1:])
    several = service.post(prompt="play some jazz", n=3, temperature=1.0, seed=3, max_tokens=12)
    assert len({choice["text"] for choice in several.json()["choices"]}) > 1


def test_stream_outlives_its_replica(service: Running, inputs: list[str]) -> None:
    """Kills the replicas one after the other while answers grow; the texts are the whole ones."""
    body = {"max_tokens": LONG, "ignore_eos": True}
    asked = inputs[:4]
    whole = [service.text(prompt, **body) for prompt in asked]
    failed = partial(Samples.sum, name="tasc_failovers_total", task=TASK)
    for _ in range(5):
        eventually(lambda: service.metrics().sum("tasc_replicas_reachable", task=TASK) == 2)
        before, begun = failed(service.metrics()), threading.Semaphore(0)

        def text(prompt: str, begun: threading.Semaphore = begun) -> str:
            url, pieces = f"{service.base}/v1/completions", []
            sent = {"model": TASK, "prompt": prompt, "stream": True, **body}
            with httpx.stream("POST", url, json=sent, timeout=DEADLINE_S) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                        begun.release()
            return "".join(pieces)

        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(text, asked)
            for _ in range(40):
                assert begun.acquire(timeout=DEADLINE_S)
            os.kill(replica_pids(TASK)[0], signal.SIGKILL)
            assert list(texts) == whole
        if failed(service.metrics()) > before:
            return
    pytest.fail("no kill met an answer in progress")


def test_new_index_is_taken_over_under_load(
    service: Running, rows: list[CorpusRow], inputs: list[str], expected: list[str]
) -> None:
    with connect(service.redis_url) as client:
        CorpusStore(client, TASK).append(rows[200:])
    artifact, _ = build_and_publish(service.redis_url, service.record)

    def swapped() -> bool:
        texts = [service.text(prompt, max_tokens=32) for prompt in inputs[:4]]
        assert texts == expected[:4]
        total = partial(service.metrics().sum, "tasc_draft_index_info", task=TASK)
        return total() == total(version=artifact.version) == 1

    eventually(swapped)


def test_batch_job_survives_its_engine_and_is_resumed_after_its_driver(
    service: Running, job_rows: list[CorpusRow], tmp_path: Path
) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(source, ({"id": row.key, "input": row.input} for row in job_rows))
    files = ["--input", source, "--output", output, "--redis-url", service.redis_url]
    own = ["--backend", "vllm", "--vllm", json.dumps(ENGINE["vllm"])]
    sizes = ["--rows", ROWS, "--max-model-len", ENGINE["max_model_len"], "--stall-timeout", 600]
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def start() -> subprocess.Popen[str]:
        code = "from tasc_jobs.cli.main import main; main()"
        arguments = map(str, ("generate", TASK, *files, *own, *sizes, "--json"))
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=os.environ | address, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def done() -> int:
        try:
            return (job_folder(output) / "records.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    with start() as driver:
        try:
            eventually(lambda: done() >= 100)
            os.kill(pids("ray::EngineActor")[0], signal.SIGKILL)
            before = done()
            eventually(lambda: done() >= before + 400)
        finally:
            driver.kill()
    assert before < done() < len(job_rows)
    assert not output.exists()
    with start() as driver:
        out, err = driver.communicate(timeout=2 * DEADLINE_S)
    assert driver.returncode == 0, err
    report = json.loads(out.splitlines()[-1])
    assert before < report["resumed"] < report["rows"] == len(job_rows)
    answers = read_rows(output)
    assert [answer["id"] for answer in answers] == [row.key for row in job_rows]
    llm = LLM(MODEL, rows=ROWS, max_model_len=512, max_tokens=32, cost_aware=False)
    texts = [answer.text for answer in llm.generate([row.input for row in job_rows])]
    assert [answer["text"] for answer in answers] == texts
