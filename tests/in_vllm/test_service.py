"""The service with ``backend: vllm`` over HTTP, and batch jobs, on the demo's model."""

import gzip
import json
import os
import signal
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

from ray import serve
from serving import Samples, replica_pids

from support import DEADLINE_S, eventually
from tasc_draft import DraftSettings
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
def rows() -> list[CorpusRow]:
    with gzip.open(DEMO / "data" / "massive_en.train.jsonl.gz", "rt", encoding="utf-8") as lines:
        read = [json.loads(line) for _, line in zip(range(400), lines, strict=False)]
    return [CorpusRow(row["id"], row["input"], row["output"]) for row in read]


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


def test_stopped_batch_job_is_resumed(
    service: Running, rows: list[CorpusRow], tmp_path: Path
) -> None:
    from tasc_jobs.batch.generate import generate
    from tasc_jobs.batch.inputs import Source
    from tasc_runtime.engine_settings import EngineSettings

    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    given = [{"id": row.key, "input": row.input} for row in rows]
    source.write_text("".join(json.dumps(row) + "\n" for row in given))
    run = partial(
        generate,
        service.redis_url,
        TASK,
        Source((str(source),)),
        output,
        engine=EngineSettings(**ENGINE),
        stall_s=600,
    )
    done = 0

    def stop() -> bool:
        return done >= 50

    def note(progress: Any) -> None:
        nonlocal done
        done = progress.report.rows

    run(should_stop=stop, progress=note)
    assert not output.exists()
    report = run()
    assert 0 < report.resumed < report.rows == len(rows)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [row.key for row in rows]
    llm = LLM(MODEL, rows=ROWS, max_model_len=512, max_tokens=32, cost_aware=False)
    texts = [answer.text for answer in llm.generate([row.input for row in rows])]
    assert [answer["text"] for answer in answers] == texts
