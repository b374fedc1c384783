"""Tests refreshes with real Redis and Ray: answers become corpus rows and a better index."""

import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import redis

from tasc_draft.replaying import answers
from tasc_jobs.demo.tasks import read_split
from tasc_jobs.errors import JobError
from tasc_jobs.index.build import build_and_publish
from tasc_jobs.index.publish import current_index
from tasc_jobs.tuning.refresh import RefreshOptions, held_out, move_collected, refresh
from tasc_jobs.tuning.replays import run
from tasc_runtime.data.local_corpus import encode
from tasc_runtime.models import load_tokenizer
from tasc_store import (
    ArtifactStore,
    CollectedRow,
    CollectedRows,
    CorpusRow,
    CorpusStore,
    IndexChanged,
    TaskRecord,
    TaskStore,
)
from tasc_text import PromptTemplate

pytestmark = [pytest.mark.redis, pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
FIRST, THEN = 250, 350
WIDE = {"max_rows": 10_000, "max_bytes": 1 << 30}
KILLED = """
import os, sys
from tasc_jobs.tuning import refresh
from tasc_store import CollectedRows, TaskStore, connect

CollectedRows.remove = lambda self, end: os._exit(9)
client = connect(sys.argv[1])
refresh.move_collected(client, TaskStore(client).get(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def shipped() -> list[CollectedRow]:
    rows = read_split("massive_en", "train")[: FIRST + THEN]
    unique = {r["input"]: CollectedRow(r["input"], r["output"]) for r in rows}
    return list(unique.values())


@pytest.fixture
def record(shipped_task: TaskRecord) -> TaskRecord:
    return shipped_task


@pytest.fixture
def store(client: redis.Redis, record: TaskRecord) -> ArtifactStore:
    return ArtifactStore(client, record.name, record.fingerprint)


def ingest(client: redis.Redis, record: TaskRecord, rows: list[CollectedRow]) -> None:
    corpus = CorpusStore(client, record.corpus_name)
    corpus.append([CorpusRow(str(i), r.input, r.output) for i, r in enumerate(rows)])


def collect(client: redis.Redis, record: TaskRecord, rows: list[CollectedRow]) -> None:
    CollectedRows(client, record.name).add(rows, **WIDE)


def corpus_of(client: redis.Redis, record: TaskRecord) -> list[tuple[str, str]]:
    return [(r.input, r.output) for r in CorpusStore(client, record.corpus_name).read(0, 10_000)]


def test_better_index_becomes_current(client, redis_url, record, store, shipped):
    ingest(client, record, shipped[:FIRST])
    first, _ = build_and_publish(redis_url, record)
    collect(client, record, [*shipped[FIRST:], shipped[FIRST]])
    reported = []
    done = refresh(redis_url, record.name, progress=lambda *to: reported.append(to))
    assert (done.moved, done.known) == (len(shipped) - FIRST, 1)
    assert corpus_of(client, record) == [(r.input, r.output) for r in shipped]
    assert len(CollectedRows(client, record.name)) == 0
    assert done.new_tokens_per_step > 1.01 * done.old_tokens_per_step > 1
    current = store.current()
    assert current is not None
    assert (done.old_version, done.version) == (first.version, current.version)
    assert (current.corpus_rows, current.forecast) == (len(shipped), done.new_tokens_per_step)
    index = current_index(store)
    assert index.corpus.documents == len(shipped), "it holds the judging rows too"
    assert index.weights is not None
    assert f"version {current.version} is current" in done.in_words
    replayed = [step for step in reported if step[0] == "replay"]
    assert replayed[-1] == ("replay", done.judged_rows, done.judged_rows)
    assert done.versions == (first.version, current.version)

    again = refresh(redis_url, record.name)
    assert (again.moved, again.new_rows, again.version) == (0, 0, None)
    assert "a new index needs 200" in again.in_words
    assert store.current() == current


def test_index_without_an_improvement_is_not_stored(client, redis_url, record, store, shipped):
    ingest(client, record, shipped[:FIRST])
    first, _ = build_and_publish(redis_url, record)
    collect(client, record, shipped[FIRST:])
    done = refresh(redis_url, record.name, RefreshOptions(margin=9.0))
    assert (done.version, done.versions) == (None, (first.version,))
    assert store.current() == first
    assert "less than 900.0% above" in done.reason
    assert len(CorpusStore(client, record.name)) == len(shipped), "the rows stay in the corpus"


def test_rows_that_judge_two_indexes_are_in_neither_index(client, redis_url, record, store):
    """The outputs are unpredictable, so only an index that has them could draft them."""
    dice = random.Random(1)

    def rows(n: int) -> list[CollectedRow]:
        numbers = [" ".join(str(dice.randrange(10**9)) for _ in range(4)) for _ in range(2 * n)]
        return [CollectedRow(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]

    ingest(client, record, rows(200))
    build_and_publish(redis_url, record)
    collect(client, record, rows(250))
    done = refresh(redis_url, record.name, RefreshOptions(margin=-0.9))
    assert done.version is not None
    assert done.old_tokens_per_step < 2
    assert done.new_tokens_per_step < 2
    _, held = held_out(200, 450)
    assert len(held) == done.judged_rows == 50
    tokenizer = load_tokenizer(record)
    corpus = CorpusStore(client, record.name).read(0, 450)
    judged = encode([corpus[i] for i in held], tokenizer, PromptTemplate(record.template))
    found = run(
        current_index(store),
        answers(judged.prompts, judged.outputs, tokenizer.eos_id),
        record.draft,
        branching=True,
        tokenizer=tokenizer,
    )
    assert found.tokens_per_step > 4, "the published one holds them"


def test_refresh_does_not_replace_an_index_made_current_meanwhile(
    client, redis_url, record, store, shipped
):
    collect(client, record, shipped[:FIRST])
    done = refresh(redis_url, record.name)
    assert (done.old_version, done.old_tokens_per_step, done.version) == (None, None, 1)
    assert store.current().forecast == done.new_tokens_per_step > 1
    build_and_publish(redis_url, record)
    collect(client, record, shipped[FIRST:])

    def someone(stage: str, done: int, total: int | None) -> None:
        if (stage, done) == ("publish", 0):
            store.announce(1)

    with pytest.raises(IndexChanged):
        refresh(redis_url, record.name, progress=someone)
    assert (store.current().version, store.versions()) == (1, [1, 2, 3])


def test_forecast_counts_forced_tokens_like_the_service(client, redis_url, record):
    """The first token decides between these labels, so each answer needs one forward pass."""
    labels = ("alarm set now", "play some music")
    TaskStore(client).put(replace(record, choices=labels))
    collect(client, record, [CollectedRow(f"text {i}", labels[i % 2]) for i in range(60)])
    done = refresh(redis_url, record.name, RefreshOptions(min_rows=20))
    _, held = held_out(0, 60)
    lengths = [len(ids) + 1 for ids in load_tokenizer(record).encode_outputs(labels)]
    tokens = [lengths[i % 2] for i in held]
    assert done.new_tokens_per_step == pytest.approx(sum(tokens) / len(tokens))


def test_refresh_waits_for_rows_newer_than_the_judged_rows(client, redis_url, record, shipped):
    ingest(client, record, shipped[:FIRST])
    done = refresh(redis_url, record.name, judged=FIRST - 199)
    assert (done.judged_rows, done.new_rows) == (0, FIRST)
    assert done.reason.startswith("199 new rows; a new index needs 200")


def test_collected_rows_are_not_added_twice_after_a_killed_move(client, redis_url, record, shipped):
    collect(client, record, shipped[:30])
    ran = subprocess.run([sys.executable, "-c", KILLED, redis_url, record.name], timeout=120)
    assert (ran.returncode, len(CorpusStore(client, record.name))) == (9, 30)
    assert len(CollectedRows(client, record.name)) == 30
    collect(client, record, shipped[30:40])
    assert move_collected(client, record) == (10, 30)
    assert corpus_of(client, record) == [(r.input, r.output) for r in shipped[:40]]


def test_collected_rows_go_into_the_corpus_of_the_task(client, task, record, shipped):
    other = replace(record, name=f"{task}-b", corpus=task)
    collect(client, other, shipped[:3])
    assert (move_collected(client, other), len(corpus_of(client, record))) == ((3, 0), 3)


def test_refresh_of_a_corpus_without_inputs_is_refused(client, redis_url, record):
    ingest(client, record, [CollectedRow("", f"out {i}") for i in range(210)])
    with pytest.raises(JobError):
        refresh(redis_url, record.name)


@pytest.mark.parametrize(("seen", "rows"), [(0, 100), (200, 401), (10, 5000), (99, 199)])
def test_index_is_judged_only_on_new_rows(seen, rows):
    kept, held = held_out(seen, rows)
    assert sorted([*kept, *held]) == list(range(rows))
    assert held.min() >= seen
    assert len(held) == min(max((rows - seen) // 5, 50), 600, (rows - seen) // 2)
    np.testing.assert_array_equal(held, held_out(seen, rows)[1])
