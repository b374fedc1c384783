"""The index job over real Redis and Ray: same bytes however parallel, current only when whole."""

from pathlib import Path

import pytest
import redis

from tasc_draft import Documents, build_index, read_index
from tasc_jobs.errors import EmptyCorpusError
from tasc_jobs.index_job import build_and_publish
from tasc_store import ArtifactStore, CorpusRow, CorpusStore, TaskRecord
from tasc_text import TaskTokenizer
from tiny import END, SENTENCES, make_tokenizer

pytestmark = [pytest.mark.redis, pytest.mark.ray]
OUTPUTS = [f"{s} {i % 7}" for i in range(40) for s in SENTENCES]


def record_of(folder: Path, task: str, **changes: object) -> TaskRecord:
    fingerprint = TaskTokenizer.from_folder(folder).fingerprint
    fields = {"name": task, "model": str(folder), "fingerprint": fingerprint}
    return TaskRecord(**{**fields, "template": "{input}\n", **changes})


@pytest.fixture
def filled(client: redis.Redis, task: str) -> str:
    rows = [CorpusRow(f"k{i}", f"in {i}", output) for i, output in enumerate(OUTPUTS)]
    CorpusStore(client, task).append(rows)
    return task


def bytes_of(store: ArtifactStore, version: int, folder: Path) -> bytes:
    path = folder / str(version)
    store.download(store.get(version), path)
    return path.read_bytes()


@pytest.mark.usefixtures("ray_cluster")
def test_one_corpus_gives_the_same_bytes_whatever_the_parallelism(
    client: redis.Redis, redis_url: str, filled: str, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path)
    record = record_of(tmp_path, filled)
    store = ArtifactStore(client, filled, record.fingerprint)
    files = []
    for parallelism in (1, 3, 16):
        artifact, _ = build_and_publish(redis_url, record, parallelism=parallelism)
        assert artifact.corpus_rows == len(OUTPUTS)
        assert store.current() == artifact
        files.append(bytes_of(store, artifact.version, tmp_path))
    assert files[0] == files[1] == files[2]


@pytest.mark.usefixtures("ray_cluster")
def test_the_published_index_is_the_one_built_in_one_piece(
    client: redis.Redis, redis_url: str, filled: str, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path)
    record = record_of(tmp_path, filled)
    tokenizer = TaskTokenizer.from_folder(tmp_path)
    artifact, built = build_and_publish(redis_url, record)
    path = tmp_path / "downloaded"
    ArtifactStore(client, filled, record.fingerprint).download(artifact, path)
    expected = build_index(
        Documents.of(tokenizer.encode_outputs(OUTPUTS)),
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.backend.token_to_id(END),
        n_max=record.draft.n_max,
        p_min=record.draft.p_min,
    )
    for found in (built, read_index(path)):
        found.check_integrity()
        for name in ("tokens", "counts", "first_child", "best_child"):
            assert (getattr(found, name) == getattr(expected, name)).all()


@pytest.mark.usefixtures("ray_cluster")
def test_one_corpus_serves_two_tokenizers(
    client: redis.Redis, redis_url: str, filled: str, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path / "a", size=300)
    make_tokenizer(tmp_path / "b", size=330)
    first = record_of(tmp_path / "a", filled)
    second = record_of(tmp_path / "b", "other", corpus=filled)
    assert first.fingerprint != second.fingerprint
    indexes = [build_and_publish(redis_url, r)[1] for r in (first, second)]
    assert [i.fingerprint for i in indexes] == [first.fingerprint, second.fingerprint]
    for record in (first, second):
        store = ArtifactStore(client, filled, record.fingerprint)
        assert store.current() is not None
        assert len(store.other_fingerprints()) == 1


@pytest.mark.usefixtures("ray_cluster")
def test_an_empty_corpus_leaves_nothing_current(
    client: redis.Redis, redis_url: str, task: str, tmp_path: Path
) -> None:
    make_tokenizer(tmp_path)
    record = record_of(tmp_path, task)
    with pytest.raises(EmptyCorpusError, match="has no rows"):
        build_and_publish(redis_url, record)
    assert ArtifactStore(client, task, record.fingerprint).current() is None
