"""`tasc generate` with the shipped model: rows with equal inputs are decoded once."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from killable import pids
from support import read_rows, write_rows
from tasc_command import InProcess
from tasc_jobs.batch import job
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.batch.work import JobProgress
from tasc_jobs.demo.tasks import demo_record, read_split
from tasc_protocol import GuideSpec, Request, Scoring
from tasc_runtime.engine_settings import EngineSettings
from tasc_store import TaskStore

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

DISTINCT, COUNT = 40, 100
ENGINE = EngineSettings(rows=4, max_model_len=128, cost_aware=False)
FLOAT32, INT8 = {}, {"quantization": "int8-dynamic"}
GUIDE = GuideSpec("choice", ("alarm_set", "weather_query", "play_music"), field="--choices")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Rows of which most repeat an earlier one, near and far, and two that no row can answer."""
    said = [row["input"] for row in read_split("massive_en", "test")[:DISTINCT]]
    texts = [said[i * 7 % DISTINCT if i % 3 else i * i % DISTINCT] for i in range(COUNT)]
    texts[20] = texts[50] = "long " * 200
    return write_rows(
        tmp_path / "in.jsonl", [{"id": f"r{i}", "input": t} for i, t in enumerate(texts)]
    )


def put(client: redis.Redis, task: str, **precision: Any) -> str:
    record = demo_record("massive_en", **precision)
    TaskStore(client).put(type(record)(**{**vars(record), "name": task}))
    return task


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(FLOAT32, id="float32"),
        pytest.param(INT8, id="int8", marks=pytest.mark.slow("two more jobs")),
    ],
)
def test_output_has_the_same_bytes_and_the_report_counts_the_copies(
    tasc_here: InProcess, client: redis.Redis, name: str, source: Path, tmp_path: Path, precision
) -> None:
    put(client, name, **precision)
    distinct = len({row["input"] for row in read_rows(source)}) - 1

    def run(output: str, *more: str) -> str:
        files = ("--input", source, "--output", tmp_path / output)
        return tasc_here.run("generate", name, *files, "--max-model-len", 128, *more)

    once, each = (
        json.loads(run(f"{i}.jsonl", "--json", *more))
        for i, more in enumerate([(), ("--no-dedupe",)])
    )
    assert (once["rows"], once["errors"], once["repeats"]) == (COUNT, 2, COUNT - 2 - distinct)
    assert (each["rows"], each["errors"], each["repeats"]) == (COUNT, 2, 0)
    assert 0 < once["tokens"] < each["tokens"]
    answers = read_rows(tmp_path / "0.jsonl")
    assert sum(len(row["tokens"]) for row in answers) == each["tokens"]
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
    # A finished job is the same job either way.
    text = run("0.jsonl", "--no-dedupe")
    assert f"{once['repeats']} with the answer of an equal row" in text
    assert f"{COUNT} rows were done before" in text


@pytest.mark.slow("six jobs")
@pytest.mark.parametrize(
    "asked",
    [
        Request(logprobs=1),
        Request(guide=GUIDE, parameters={"presence_penalty": 0.5}),
        Request(guide=GUIDE, scoring=Scoring()),
    ],
    ids=["logprobs", "guide", "probabilities"],
)
def test_columns_of_a_copy_are_those_of_its_own_answer(
    redis_url: str, client: redis.Redis, name: str, source: Path, tmp_path: Path, asked: Request
) -> None:
    put(client, name)
    found = []
    for output, more in (("on", {}), ("off", {"dedupe_bytes": 0})):
        path = tmp_path / f"{output}.jsonl"
        generate(redis_url, name, Source.of(source), path, engine=ENGINE, asked=asked, **more)
        found.append(read_rows(path))
    assert found[0] == near(found[1])


def near(rows: Any) -> Any:
    """Floats equal others within 5e-5: their last digits depend on other rows of a step."""
    return json.loads(
        json.dumps(rows), parse_float=lambda text: pytest.approx(float(text), abs=5e-5)
    )


def test_sampled_rows_are_decoded_each(
    redis_url: str, client: redis.Redis, name: str, tmp_path: Path
) -> None:
    put(client, name)
    source = write_rows(tmp_path / "in.jsonl", [{"input": "wake me at nine"}] * 12)
    warm, output = Request(parameters={"temperature": 2.0}), tmp_path / "out.jsonl"
    report = generate(redis_url, name, Source.of(source), output, engine=ENGINE, asked=warm)
    assert report.repeats == 0
    assert len({row["text"] for row in read_rows(output)}) > 3


@pytest.mark.slow("kills an engine")
def test_killed_engine_changes_no_answer_of_waiting_rows(
    redis_url: str,
    client: redis.Redis,
    name: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "_REPORT_S", 0.0)  # else the job may end between two reports
    put(client, name)
    killed: list[int] = []

    def kill(found: JobProgress) -> None:
        if found.engines and found.running and not killed:
            killed.extend(pids("ray::EngineActor"))
            os.kill(killed[0], signal.SIGKILL)

    on, off = tmp_path / "on.jsonl", tmp_path / "off.jsonl"
    report = generate(redis_url, name, Source.of(source), on, engine=ENGINE, progress=kill)
    each = generate(redis_url, name, Source.of(source), off, engine=ENGINE, dedupe_bytes=0)
    assert killed
    assert (report.rows, report.errors) == (each.rows, each.errors) == (COUNT, 2)
    assert report.repeats > each.repeats == 0
    assert on.read_bytes() == off.read_bytes()
