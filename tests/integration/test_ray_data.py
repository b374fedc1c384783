"""Tests that Ray datasets are answered and classified like `LLM` does, also if actors die."""

import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import redis
from ray.data import DataContext, Dataset
from ray.data.expressions import col

from killable import pids
from support import record_of
from tasc_jobs.demo.tasks import ADAPTERS, MODEL, demo_record, read_split
from tasc_protocol import FieldError
from tasc_runtime.errors import ServiceError
from tasc_runtime.llm import LLM
from tasc_serve import data
from tasc_store import TaskStore, UnknownTask
from tasc_text import TextError
from tiny import make_folder

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
ENGINE = {"rows": 8, "max_model_len": 128, "cost_aware": False}
SHIPPED = {"adapter": ADAPTERS / "massive_en", "template": "intent and slots: {input}\n", **ENGINE}
LABELS = ["intent: alarm_set", "intent: play_music", "intent: weather_query"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [row["input"] for row in read_split("massive_en", "test")[:500]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, **SHIPPED)


@pytest.fixture(scope="module")
def expected(llm: LLM, texts: list[str]) -> list[str]:
    return [answer.text for answer in llm.generate(texts, draft=False)]


@pytest.fixture
def task(client: redis.Redis, name: str) -> str:
    """The name of a task with the shipped model."""
    shipped = demo_record("massive_en")
    record = record_of(MODEL, name, shipped.template, adapter=shipped.adapter)
    TaskStore(client).put(record)
    return name


def table(texts: list[Any], blocks: int = 4) -> Dataset:
    """The texts in blocks, with ids beside them."""
    rows = [{"id": i, "text": text, "tags": [i, -i]} for i, text in enumerate(texts)]
    return ray.data.from_items(rows, override_num_blocks=blocks)


def ordered(dataset: Dataset) -> list[dict[str, Any]]:
    return sorted(dataset.take_all(), key=lambda row: row["id"])


def test_rows_of_files_are_answered_in_order_beside_their_columns(texts, expected, tmp_path):
    source, answers = tmp_path / "rows", tmp_path / "answers"
    source.mkdir()
    for part in range(4):
        some = texts[part * 25 : part * 25 + 25]
        ids = [part * 25 + i for i in range(25)]
        own = {"id": ids, "utterance": some, "tags": [[str(i)] for i in ids]}
        pq.write_table(pa.table(own), source / f"{part}.parquet")
    dataset = ray.data.read_parquet(str(source))
    found = data.generate(
        dataset,
        MODEL,
        input="utterance",
        output="said",
        error="why",
        concurrency=(1, 2),
        batch_size=25,
        preserve_order=True,
        engine=SHIPPED,
    )
    found.write_parquet(str(answers))
    out = [row for file in sorted(answers.iterdir()) for row in pq.read_table(file).to_pylist()]
    assert [row["id"] for row in out] == list(range(100))
    assert [row["utterance"] for row in out] == texts[:100]
    assert [row["tags"] for row in out] == [[str(i)] for i in range(100)]
    assert [row["said"] for row in out] == expected[:100]
    assert {(row["said_finish_reason"], row["why"]) for row in out} == {("stop", None)}
    assert not DataContext.get_current().execution_options.preserve_order


def test_labels_and_probabilities_equal_those_of_classify(texts, llm):
    options = {"end": ",", "exact": True, "abstain_below": 0.9}
    right = llm.classify(texts[:40], LABELS, **options)
    found = data.classify(
        table(texts[:40]), MODEL, LABELS, probabilities=True, engine=SHIPPED, **options
    )
    rows = ordered(found)
    assert [row["label"] for row in rows] == [one.label for one in right]
    assert {None} < {row["label"] for row in rows}
    assert [row["label_probability"] for row in rows] == [one.probability for one in right]
    assert [row["label_unseen_mass"] for row in rows] == [one.unseen_mass for one in right]
    scored = [{p["label"]: p["probability"] for p in row["label_probabilities"]} for row in rows]
    assert scored == [dict(one.probabilities) for one in right]
    assert {row["error"] for row in rows} == {None}

    options = {"end": ",", "abstain_below": 0.9, "abstain_label": "unsure"}
    near = ordered(data.classify(table(texts[:40]), MODEL, LABELS, engine=SHIPPED, **options))
    for row, exact in zip(near, rows, strict=True):
        limit = row["label_unseen_mass"] + 1e-6
        assert row["label_probability"] == pytest.approx(exact["label_probability"], abs=limit)
    assert {"unsure"} < {row["label"] for row in near} <= {"unsure", *LABELS}
    assert set(near[0]) == {
        *("id", "text", "tags", "error"),
        *("label", "label_probability", "label_unseen_mass"),
    }


def test_rows_without_an_answer_have_the_reason_and_others_are_answered(texts, expected, llm):
    mixed = [texts[0], None, 7, "wake " * 200, texts[1], ["a"], ""]
    rows = ordered(data.generate(table(mixed, 1), MODEL, engine=SHIPPED))
    bad = data.generate(table(mixed, 1), MODEL, engine=SHIPPED).filter(
        expr=col("error").is_not_null()
    )
    assert [row["id"] for row in ordered(bad)] == [1, 2, 3, 5]
    blank = llm.generate("")[0].text
    assert [row["answer"] for row in rows] == [
        *(expected[0], None, None, None, expected[1], None, blank)
    ]
    assert [bool(row["error"]) for row in rows] == [*(False, True, True, True, False, True, False)]
    for row in rows:
        assert row["answer_finish_reason"] == ("error" if row["error"] else "stop")
    assert rows[1]["error"] == "input: None is not a text"
    assert rows[2]["error"] == "input: 7 is not a text"
    assert re.match(r"input has \d+ tokens; a row holds 128, ", rows[3]["error"])
    scored = data.classify(
        table(mixed, 1), MODEL, LABELS, end=",", probabilities=True, engine=SHIPPED
    )
    for row, answered in zip(ordered(scored), rows, strict=True):
        assert bool(row["error"]) == bool(answered["error"])
        missing = [row[name] is None for name in row if name.startswith("label")]
        assert missing == [bool(row["error"])] * 4

    frame = pd.DataFrame({"text": [texts[0], None, float("nan")], "id": range(3)})
    rows = ordered(data.generate(ray.data.from_pandas(frame), MODEL, engine=SHIPPED))
    assert [row["answer"] for row in rows] == [expected[0], None, None]


@pytest.mark.slow("jobs with engines of their own")
def test_task_is_answered_in_the_version_of_the_call(texts, expected, task, client, redis_url):
    where = {"redis_url": redis_url, "engine": ENGINE}
    short = data.generate(table(texts[:20]), task, max_tokens=3, **where)
    found = data.generate(table(texts[:20]), task, **where)
    other = record_of(MODEL, task, "other: {input}\n")
    assert TaskStore(client).put(other) == 2
    assert [row["answer"] for row in ordered(found)] == expected[:20]
    assert {row["answer_finish_reason"] for row in ordered(short)} == {"length"}


@pytest.mark.slow("jobs with engines of their own")
def test_saved_folder_is_answered_and_answers_can_be_classified(texts, llm, tmp_path):
    choices = LLM(MODEL, choices=LABELS, **SHIPPED)
    choices.save(tmp_path / "task")
    right = [answer.text for answer in choices.generate(texts[:10])]
    answers = data.generate(table(texts[:10]), tmp_path / "task")
    both = data.classify(answers, tmp_path / "task", error="why_not", end=",", exact=True)
    rows = ordered(both)
    assert [row["answer"] for row in rows] == right
    assert [row["label"] for row in rows] == [
        one.label for one in choices.classify(texts[:10], end=",", exact=True)
    ]


@pytest.mark.slow("jobs with engines of their own")
def test_sampled_answers_depend_on_the_text_and_the_seed_alone(texts):
    def answers(batch_size: int, concurrency: int, seed: int) -> list[str]:
        pool = {"batch_size": batch_size, "concurrency": concurrency, "engine": SHIPPED}
        options = {"temperature": 2.0, "seed": seed, "max_tokens": 16}
        found = data.generate(table(some, 5), MODEL, **pool, **options)
        return [row["answer"] for row in ordered(found)]

    some = [*texts[:20], *texts[:5]]
    first = answers(256, 1, 5)
    assert answers(4, 2, 5) == first
    assert first[20:] == first[:5]
    assert answers(256, 1, 6) != first


@pytest.mark.slow("kills an actor")
def test_killed_actor_is_replaced_and_each_row_is_answered_once(texts, expected):
    dataset = table(texts, blocks=20)
    found = data.generate(dataset, MODEL, batch_size=25, engine=SHIPPED)
    workers, rows = set(), []
    for batch in found.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        rows += batch.to_pylist()
        now = set(pids("ray::MapWorker(MapBatches(LLMActor))"))
        if not workers:
            assert len(now) == 1
            assert len(rows) < len(texts) / 2
            os.kill(*now, signal.SIGKILL)
        workers |= now
    assert len(workers) == 2
    assert sorted(row["id"] for row in rows) == list(range(len(texts)))
    assert {row["id"]: row["answer"] for row in rows} == dict(enumerate(expected))


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        ({"input": "txt"}, ValueError, "'txt'"),
        ({"input": "id"}, ValueError, "int64"),
        ({"input": "tags"}, ValueError, "list"),
        ({"output": "id"}, ValueError, "'id'"),
        ({"error": "tags"}, ValueError, "'tags'"),
        ({"output": "error"}, ValueError, "'error'"),
        ({"temprature": 1}, FieldError, "temperature"),
        ({"temperature": -1}, FieldError, "temperature"),
        ({"n": 3}, ValueError, "n"),
        ({"logprobs": 3}, ValueError, "logprobs"),
        ({"guided_json": {}, "guided_regex": "a"}, FieldError, "guided"),
        ({"engine": {"row": 8}}, ValueError, "rows"),
        ({"engine": {"rows": 0}}, ValueError, "rows"),
        ({"concurrency": 0}, ValueError, "size"),
        ({"model": "./no-such-folder"}, TextError, "no-such-folder"),
        ({"model": "no-such-task"}, UnknownTask, "no-such-task"),
        ({"model": "task", "redis_url": None}, ServiceError, "REDIS_URL"),
    ],
    ids=str,
)
def test_wrong_argument_is_named_before_an_actor_starts(
    wrong, error, named, redis_url, monkeypatch
):
    monkeypatch.delenv("REDIS_URL", raising=False)
    given = {"model": MODEL, "redis_url": redis_url, "engine": SHIPPED, **wrong}
    with pytest.raises(error, match=named):
        data.generate(table(["a"], 1), **given)


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        ({"labels": []}, FieldError, "labels"),
        ({"tolerance": 2}, FieldError, "tolerance"),
        ({"max_tokens": 3}, ValueError, "max_tokens"),
        ({"prior": "empty"}, ValueError, "prior"),
        ({"end": 3}, ValueError, "end"),
        ({"error": "label_probability"}, ValueError, "label_probability"),
        ({"output": "text"}, ValueError, "'text'"),
    ],
    ids=str,
)
def test_wrong_argument_of_classify_is_named_before_an_actor_starts(wrong, error, named):
    given = {"model": MODEL, "labels": LABELS, "engine": SHIPPED, **wrong}
    with pytest.raises(error, match=named):
        data.classify(table(["a"], 1), **given)


def test_blocks_with_different_types_are_refused():
    dataset = ray.data.from_items([{"text": "a"}, {"text": 3}], override_num_blocks=2)
    with pytest.raises(ValueError, match="text"):
        data.generate(dataset, MODEL, engine=SHIPPED)


def test_engine_that_cannot_be_built_ends_the_job_with_its_error(tmp_path: Path):
    folder = make_folder(tmp_path)
    wrong = {"adapter": ADAPTERS / "massive_en", **ENGINE}  # of another model
    with pytest.raises(ray.exceptions.RayError, match="adapter"):
        data.generate(table(["a"], 1), folder, engine=wrong).take_all()


def test_option_that_the_task_refuses_ends_the_job_with_its_error(texts):
    found = data.generate(table(texts[:4]), MODEL, adapter="other", engine=SHIPPED)
    with pytest.raises(ray.exceptions.RayTaskError, match="other"):
        found.take_all()


@pytest.mark.filterwarnings("ignore:The minimum number of concurrent actors:UserWarning")
def test_dataset_without_rows_stays_empty():
    assert data.generate(ray.data.from_items([]), MODEL, engine=SHIPPED).take_all() == []


@pytest.mark.slow("an example with a Ray of its own")
def test_example_prints_answers_and_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ray_data.py"))
    out = capsys.readouterr().out
    assert "intent: alarm_set, slot fills: {time: five am, date: this week}" in out
    assert "(intent: alarm_set 100%)" in out
