"""The batch job in a Ray Data actor pool: each row once, in order, with generate's answer."""

import json
from pathlib import Path

import pytest
import redis
import torch
from transformers import AutoModelForCausalLM

from tasc_draft import DraftSettings
from tasc_engine import GuideSpec
from tasc_jobs.errors import FileError
from tasc_jobs.generate import generate
from tasc_jobs.index_job import build_and_publish
from tasc_serve.asked import Asked, Guide
from tasc_serve.settings import EngineSettings
from tasc_store import CorpusRow, CorpusStore, TaskRecord, TaskStore
from tasc_text import TaskTokenizer
from tiny import make_folder, plain

pytestmark = [pytest.mark.redis, pytest.mark.ray]
ENGINE = EngineSettings(rows=8, max_model_len=64, cost_aware=False)
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("generate"))


@pytest.fixture
def served(client: redis.Redis, task: str, folder: Path) -> TaskRecord:
    record = TaskRecord(
        name=task,
        model=str(folder),
        fingerprint=TaskTokenizer.from_folder(folder).fingerprint,
        template="say {input}\n",
        dtype="float64",
        max_tokens=MAX_TOKENS,
        draft=DraftSettings(min_prob=0.0),
    )
    TaskStore(client).put(record)
    return record


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(folder: Path, inputs: list[str]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = TaskTokenizer.from_folder(folder)
    prompts = [tokenizer.encode_prompt(f"say {text}\n") for text in inputs]
    return [plain(model, p, MAX_TOKENS) for p in prompts]


@pytest.mark.usefixtures("ray_cluster")
def test_every_row_once_in_order_with_the_answer_of_generate(
    client: redis.Redis, redis_url: str, served: TaskRecord, folder: Path, tmp_path: Path
) -> None:
    inputs = [f"wake me at {i} " + "please " * (i % 5) for i in range(30)]
    right = expected(folder, inputs)
    tokenizer = TaskTokenizer.from_folder(folder)
    rows = [CorpusRow(str(i), "x", tokenizer.decode(a)) for i, a in enumerate(right[:20])]
    CorpusStore(client, served.name).append(rows)
    artifact, _ = build_and_publish(redis_url, served)
    source = write(
        tmp_path / "in.jsonl", [{"id": f"r{i}", "input": t} for i, t in enumerate(inputs)]
    )
    drafted = generate(redis_url, served.name, source, tmp_path / "out.jsonl", engine=ENGINE)
    assert drafted.block_efficiency > 1
    assert drafted.rows == 30
    assert drafted.errors == 0
    out = read(tmp_path / "out.jsonl")
    assert [row["id"] for row in out] == [f"r{i}" for i in range(30)]
    assert [row["tokens"] for row in out] == right
    assert {row["index_version"] for row in out} == {artifact.version}


@pytest.mark.usefixtures("ray_cluster")
def test_a_row_that_cannot_be_answered_keeps_its_place_and_says_why(
    redis_url: str, served: TaskRecord, tmp_path: Path
) -> None:
    rows = [{"id": "a", "input": "hi"}, {"id": "b"}, [1], {"id": "c", "input": "long " * 200}]
    source = write(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    report = generate(redis_url, served.name, source, output, engine=ENGINE, draft=False)
    out = read(output)
    assert (report.rows, report.errors) == (4, 3)
    assert report.first_error == f"row 2: {out[1]['error']}"
    assert [row["id"] for row in out] == ["a", "b", "3", "c"]
    assert "error" not in out[0]
    assert "no string field 'input'" in out[1]["error"]
    assert "a row holds 64" in out[3]["error"]


@pytest.mark.usefixtures("ray_cluster")
def test_a_missing_input_file_is_said_before_anything_runs(
    redis_url: str, served: TaskRecord, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(FileError, match="nowhere"):
        generate(redis_url, served.name, tmp_path / "nowhere.jsonl", output)
    assert not output.exists()


@pytest.mark.usefixtures("ray_cluster")
def test_rows_are_answered_by_the_jobs_own_guide_and_rule(
    redis_url: str, served: TaskRecord, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [{"input": "wake me"} for _ in range(12)])
    labels = ("alarm", "weather", "music")
    guide = Guide(GuideSpec("choice", labels), "--choices")

    def answers(name: str, **asked: object) -> list[str]:
        generate(
            redis_url, served.name, source, tmp_path / name, engine=ENGINE, asked=Asked(**asked)
        )
        return [row["text"] for row in read(tmp_path / name)]

    greedy = answers("greedy.jsonl", guide=guide)
    assert len(set(greedy)) == 1
    assert set(greedy) <= set(labels)
    sampled = answers("sampled.jsonl", temperature=2.0, seed=3)
    assert len(set(sampled)) > 3  # random numbers of each row are its own
    assert answers("again.jsonl", temperature=2.0, seed=3) == sampled
