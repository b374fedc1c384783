"""Jobs that score labels: `tasc generate --probabilities`, `tasc calibrate` and batch lines."""

import math
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import redis
from batch_jobs import ENGINE, WorkerRun, answers, asked, record_of, request, rows
from openai import OpenAI

from support import read_rows, write_rows
from tasc_jobs.batch.generate import generate
from tasc_jobs.batch.inputs import Source
from tasc_jobs.errors import JobError
from tasc_jobs.tuning.calibrate import calibrate_job
from tasc_protocol import Request, Scoring
from tasc_runtime.data.rows import Fields
from tasc_runtime.llm import LLM, Classification
from tasc_store import TaskStore

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LABELS = ("alarm", "alarm set", "music", "time: nine")
SIZES = {"max_model_len": 128, "device": "cpu", "cost_aware": False}


@pytest.fixture
def labelled(client: redis.Redis, task: str, folder: Path) -> str:
    TaskStore(client).put(record_of(task, folder, choices=LABELS))
    return task


def test_rows_get_the_probabilities_of_their_labels(
    redis_url: str, client: redis.Redis, labelled: str, tmp_path: Path
) -> None:
    engine = ENGINE.model_copy(update={"max_model_len": 128})
    source = Source.of(write_rows(tmp_path / "in.jsonl", rows(30)))
    scored = Request(scoring=Scoring())
    for name in ("out.jsonl", "again.jsonl", "out.parquet"):
        generate(redis_url, labelled, source, tmp_path / name, engine=engine, asked=scored)
    out = read_rows(tmp_path / "out.jsonl")
    llm = LLM.from_task(labelled, redis_url, **SIZES)
    own = llm.classify([row["input"] for row in rows(30)])
    assert [row["text"] for row in out] == [one.label for one in own]
    assert {one.label for one in own} <= set(LABELS)
    for row, one in zip(out, own, strict=True):
        assert row["probability"] == row["probabilities"][0]["probability"]
        assert row["probability"] == pytest.approx(one.probability, abs=2 * 0.001)
        assert row["unseen_mass"] <= 0.001
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["probabilities"].to_pylist() == [row["probabilities"] for row in out]

    # Unsure rows have no label.
    middle = sorted(row["probability"] for row in out)[15]
    sure = Request(scoring=Scoring(abstain_below=middle))
    generate(redis_url, labelled, source, tmp_path / "sure.jsonl", engine=engine, asked=sure)
    found = [row["text"] for row in read_rows(tmp_path / "sure.jsonl")]
    assert 0 < found.count("") < 30


def mostly_right(texts: list[str], found: Sequence[Classification]) -> list[dict[str, str]]:
    """Makes rows whose labels are mostly the likeliest."""
    labels = [LABELS[i % 4] if i % 3 == 0 else str(one.label) for i, one in enumerate(found)]
    return [{"input": x, "output": y} for x, y in zip(texts, labels, strict=True)]


def test_calibration_makes_a_version_that_jobs_use(
    redis_url: str, client: redis.Redis, labelled: str, tmp_path: Path
) -> None:
    texts = [str(row["input"]) for row in rows(80)]
    llm = LLM.from_task(labelled, redis_url, **SIZES)
    before = llm.classify(texts, exact=True)
    divided = llm.classify(texts, prior="empty", exact=True)
    files, others = (
        [write_rows(tmp_path / f"{number}.jsonl", mostly_right(texts, found))]
        for number, found in enumerate((before, divided))
    )
    figures, page = calibrate_job(client, redis_url, labelled, files, Fields(), None, **SIZES)
    record = TaskStore(client).get(labelled)
    assert figures["version"] == TaskStore(client).versions(labelled)[-1] == 2
    assert record.label_temperature == figures["temperature"] != 1
    assert len(page.tables) == len(page.plots) == 2
    after = LLM.from_task(labelled, redis_url, **SIZES).classify(texts, exact=True)
    biases = dict(zip(LABELS, record.label_biases or (0.0,) * 4, strict=True))
    for one, other in zip(before, after, strict=True):
        shares = {
            label: share ** (1 / record.label_temperature) * math.exp(biases[label])
            for label, share in one.probabilities.items()
        }
        total = sum(shares.values())
        assert other.probability == pytest.approx(max(shares.values()) / total)
    figures, _ = calibrate_job(
        client, redis_url, labelled, others, Fields(), None, "empty", **SIZES
    )
    assert TaskStore(client).get(labelled).label_biases == figures["biases"] != ()
    wrong = [write_rows(tmp_path / "wrong.jsonl", [{"input": "x", "output": "none"}] * 60)]
    with pytest.raises(JobError, match="none"):
        calibrate_job(client, redis_url, labelled, wrong, Fields(), None, **SIZES)


def test_batch_lines_classify(openai: OpenAI, run: WorkerRun, served: str, folder: Path) -> None:
    body = {"model": served, "input": ["wake me at nine", "play"], "labels": [*LABELS]}
    lines = [
        request("good", "/v1/classify", body),
        request("few", "/v1/classify", body | {"top_k": 1, "exact": True}),
        request("no labels", "/v1/classify", {"model": served, "input": "x"}),
    ]
    batch = asked(openai, lines, "/v1/classify")
    run.worker().run_waiting()
    done = openai.batches.retrieve(batch.id)
    assert done.status == "completed"
    found = answers(openai, done.output_file_id)
    assert list(found) == ["good", "few"]
    good, few = (found[name]["response"]["body"]["data"] for name in ("good", "few"))
    own = LLM(folder, template="say {input}\n", dtype="float64", **SIZES).classify(
        body["input"], LABELS, exact=True
    )
    assert [entry["label"] for entry in good] == [one.label for one in own]
    assert [entry["probs"] for entry in few] == [[pytest.approx(one.probability)] for one in own]
    assert (
        "labels"
        in answers(openai, done.error_file_id)["no labels"]["response"]["body"]["error"]["message"]
    )
