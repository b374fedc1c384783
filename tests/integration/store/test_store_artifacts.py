"""Artifacts in a real Redis: versions, the current one, roll-back, refusals."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support import eventually, refused
from tasc_store import (
    ArtifactStore,
    CorruptArtifact,
    FingerprintMismatch,
    IndexChanged,
    StoreError,
    UnknownVersion,
)

pytestmark = pytest.mark.redis
CHUNK = "tasc:{task}:index:finger:chunk:%d:%d"


def test_artifact_of_several_chunks_is_read_back_and_does_not_expire(
    store: ArtifactStore, source: Path, tmp_path: Path, client: redis.Redis
) -> None:
    artifact = store.publish(source, corpus_rows=7)
    assert (artifact.version, artifact.chunks, artifact.size_bytes) == (1, 3, 25)
    assert store.get(1) == artifact
    store.download(artifact, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert [client.ttl(CHUNK % (1, i)) for i in range(4)] == [-1, -1, -1, -2]


def test_announced_version_is_current_until_another_is_announced(
    store: ArtifactStore, source: Path
) -> None:
    assert store.current() is None
    first, second = store.publish(source, 1), store.publish(source, 2)
    assert store.current() is None
    store.announce(2, after=0)
    with pytest.raises(IndexChanged):
        store.announce(1, after=0)
    assert store.current() == second
    store.announce(1, after=2)
    with pytest.raises(UnknownVersion):
        store.announce(9, after=1)
    assert store.current() == first
    store.announce(2)
    assert store.current() == second


@pytest.mark.parametrize(
    "damage",
    [
        lambda client: client.setrange(CHUNK % (1, 1), 3, b"x"),
        lambda client: client.set(CHUNK % (1, 2), b""),
        lambda client: client.delete(CHUNK % (1, 1)),
    ],
    ids=["changed", "emptied", "lost"],
)
def test_damaged_chunk_is_refused_and_the_old_file_stays(store, source, tmp_path, client, damage):
    artifact = store.publish(source, 1)
    store.download(artifact, tmp_path / "copy")
    damage(client)
    with refused(CorruptArtifact, "version 1", "task"):
        store.download(artifact, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"copy", source.name}


def test_killed_publish_leaves_the_old_version_current(redis_url, store, source, tmp_path, client):
    old = store.publish(source, 1)
    store.announce(1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = (
        "import sys, pathlib, tasc_store as t\n"
        "store = t.ArtifactStore(t.connect(sys.argv[1]), 'task', 'finger', chunk_bytes=10)\n"
        "store.publish(pathlib.Path(sys.argv[2]), 1)"
    )
    # The pipe stays open until the kill: the publisher gets two chunks and waits for the third.
    with (
        subprocess.Popen([sys.executable, "-c", code, redis_url, str(pipe)]) as publisher,
        pipe.open("wb", buffering=0) as feed,
    ):
        feed.write(bytes(25))
        eventually(lambda: client.exists(CHUNK % (2, 1)) == 1)
        publisher.kill()
        publisher.wait()
    assert client.ttl(CHUNK % (2, 0)) > 0
    assert (store.versions(), store.current()) == ([1], old)
    with pytest.raises(UnknownVersion):
        store.announce(2)
    assert store.publish(source, 1).version == 3


def test_deletion_removes_a_version_but_not_the_current_version(store, source, client) -> None:
    store.publish(source, 1)
    store.announce(1)
    with refused(StoreError, "version 1"):
        store.delete(1)
    keys = set(client.keys())
    store.publish(source, 1)
    store.delete(2)
    assert set(client.keys()) == keys
    with pytest.raises(UnknownVersion):
        store.delete(2)


def test_pruning_keeps_the_newest_and_the_current_versions(
    store: ArtifactStore, source: Path
) -> None:
    for _ in range(5):
        store.publish(source, 1)
    store.announce(2)
    assert store.prune(keep=2) == [1, 3]
    assert store.versions() == [2, 4, 5]


def test_index_of_another_tokenizer_is_refused_and_named(store, source, tmp_path, client) -> None:
    other = ArtifactStore(client, "task", "other")
    foreign = other.publish(source, 1)
    assert store.other_fingerprints() == []
    other.announce(1)
    assert store.other_fingerprints() == ["other"]
    assert store.current() is None
    with refused(FingerprintMismatch, "other", "finger"):
        store.download(foreign, tmp_path / "copy")
    with pytest.raises(CorruptArtifact):
        store.download(replace(foreign, fingerprint="finger"), tmp_path / "copy")


def test_empty_file_is_not_published(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with refused(ValueError, str(tmp_path / "empty")):
        store.publish(tmp_path / "empty", 0)
    assert store.versions() == []
