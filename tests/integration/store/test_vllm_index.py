"""The proposer for vLLM follows the current index of a task in Redis."""

import logging
from pathlib import Path

import pytest
import redis

from support import refused
from tasc_draft import DraftError, Tokens, build_index, write_index
from tasc_draft.vllm import StoreSource, VllmDrafting, source_of
from tasc_jobs.demo.tasks import MODEL, demo_record
from tasc_store import ArtifactStore, TaskStore
from tasc_text import TaskTokenizer

TOKENIZER = TaskTokenizer.from_folder(MODEL)
TASK = "massive_en"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def indexes(client: redis.Redis) -> ArtifactStore:
    TaskStore(client).put(demo_record(TASK))
    return ArtifactStore(client, TASK, TOKENIZER.fingerprint)


@pytest.fixture
def source(redis_url: str) -> StoreSource:
    found = source_of(VllmDrafting(task=TASK, redis_url=redis_url), str(MODEL))
    assert isinstance(found, StoreSource)
    return found


def published(indexes: ArtifactStore, folder: Path, rows: int) -> None:
    outputs = Tokens.of(TOKENIZER.encode_outputs([f"alarm {n}" for n in range(rows)]))
    write_index(build_index(outputs, **TOKENIZER.index_facts), folder / "made")
    indexes.announce(indexes.publish(folder / "made", rows).version)


def documents(index: object) -> int:
    return len(index.corpus.offsets) - 1  # type: ignore[attr-defined]


def test_each_announced_version_is_returned_once(indexes, source, tmp_path):
    published(indexes, tmp_path, 20)
    assert documents(source.first()) == 20
    assert source.newer() is None
    published(indexes, tmp_path, 30)
    found = source.newer()
    assert found is not None
    assert documents(found) == 30
    assert source.newer() is None


def test_task_without_an_index_gets_its_first_one_later(indexes, source, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert documents(source.first()) == 0
    assert "has no index yet" in caplog.text
    published(indexes, tmp_path, 20)
    found = source.newer()
    assert found is not None
    assert documents(found) == 20


def test_redis_that_is_away_at_the_start_is_used_when_it_answers(
    indexes, source, redis_url, tmp_path, caplog
):
    published(indexes, tmp_path, 20)
    source._url = "redis://127.0.0.1:1"
    with caplog.at_level(logging.WARNING):
        assert documents(source.first()) == 0
    assert "until Redis answers" in caplog.text
    source._url = redis_url
    found = source.newer()
    assert found is not None
    assert documents(found) == 20


def test_unknown_task_is_refused(client, source):
    with refused(DraftError, TASK):
        source.first()
