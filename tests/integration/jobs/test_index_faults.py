"""Tests the index job when it is killed, and with a corpus larger than the store."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import redis

from support import record_of
from tasc_draft import Tokens
from tasc_draft.index.corpus_build import distinct
from tasc_draft.index.corpus_sort import sort_part
from tasc_jobs.index.build import build_and_publish, sorted_parts
from tasc_store import ArtifactStore, CorpusRow, CorpusStore, TaskRecord, TaskStore
from tasc_text import TaskTokenizer
from tiny import SENTENCES, make_tokenizer

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


KILLED = """
import sys, time
from tasc_jobs.index.build import build_and_publish
from tasc_jobs.ray_local import local_ray
from tasc_store import TaskStore, connect

url, task, stage, done = sys.argv[1:]


def wait_to_be_killed(*where):
    if where[:2] == (stage, int(done)):
        print("there", flush=True)
        time.sleep(600)


with local_ray():
    record = TaskStore(connect(url)).get(task)
    build_and_publish(url, record, parallelism=2, progress=wait_to_be_killed)
"""

TINY_STORE = """
import sys
import ray
from tasc_jobs.index.build import build_and_publish
from tasc_jobs.ray_local import local_ray
from tasc_store import TaskStore, connect

url, task = sys.argv[1:]
with local_ray(num_cpus=2, object_store_mb=80):
    room = ray.cluster_resources()["object_store_memory"]
    artifact, index = build_and_publish(url, TaskStore(connect(url)).get(task))
print(int(room), artifact.version, index.inputs.rows)
"""


@pytest.fixture
def record(client: redis.Redis, task: str, tmp_path: Path) -> TaskRecord:
    make_tokenizer(tmp_path / "model")
    record = record_of(tmp_path / "model", task)
    TaskStore(client).put(record)
    return record


def fill(client: redis.Redis, task: str, rows: int, words: int, *vocabulary: str) -> None:
    """Adds rows with ``words`` random words in the input."""
    store, draw = CorpusStore(client, task), np.random.default_rng(0).choice
    for i in range(rows):
        store.append([CorpusRow(f"k{i}", " ".join(draw(vocabulary, words)), SENTENCES[i % 6])])


@pytest.mark.parametrize(
    ("stage", "done"),
    [
        pytest.param("tokenise", 0, marks=pytest.mark.slow("another kill")),
        ("sort", 1),
        pytest.param("publish", 1, marks=pytest.mark.slow("another kill")),
    ],
)
def test_killed_index_job_leaves_the_old_version_current(
    client: redis.Redis, redis_url: str, record: TaskRecord, tmp_path: Path, stage: str, done: int
) -> None:
    fill(client, record.name, 300, 3, "wake", "me", "up")
    store = ArtifactStore(client, record.name, record.fingerprint)
    old, _ = build_and_publish(redis_url, record)
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    env["TMPDIR"] = str(tmp_path)  # files of a killed job are removed with the test's folder
    command = [sys.executable, "-c", KILLED, redis_url, record.name, stage, str(done)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "there\n"
        job.kill()
    assert store.current() == old
    new, _ = build_and_publish(redis_url, record)
    assert store.current() == new
    assert new.version > old.version


@pytest.mark.slow("a Ray of its own")
def test_corpus_may_exceed_the_object_store(client, redis_url, record) -> None:
    rows, words = 1000, 2_900
    fill(client, record.name, rows, words, "qzjxvkwq", "QZJXVKWQ", "1234567890123456", "%&/()=")
    env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    command = [sys.executable, "-c", TINY_STORE, redis_url, record.name]
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    room, version, found = map(int, ran.stdout.split())
    tokenizer = TaskTokenizer.from_folder(Path(record.model))
    sample = CorpusStore(client, record.name).read(0, 1)[0]
    ids = rows * 4 * len(tokenizer.encode_prompt(sample.input))
    assert ids > 1.3 * room
    assert (version, found) == (1, rows)


def test_parallel_sort_with_empty_parts_equals_a_single_sort() -> None:
    ids = np.zeros(400, np.int32)  # nearly every gram is the same, so splitters are
    documents = distinct(Tokens(ids, np.array([400])), vocab_size=50, eos_id=1)
    found = sorted_parts(documents, 8)
    assert 0 in [len(order) for order, _ in found]
    whole = sort_part(documents.text, documents.offsets, documents.counts)
    for parts, expected in zip(zip(*found, strict=True), whole, strict=True):
        assert np.array_equal(np.concatenate(parts), expected)
