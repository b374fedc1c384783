"""Tests the node-local cache: one download per machine, bounded files, no damaged files."""

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from support import refused
from tasc_store import Artifact, ArtifactCache, ArtifactStore, CorruptArtifact, StoreError

pytestmark = pytest.mark.redis
FETCH = """
import sys, pathlib, tasc_store as t
store = t.ArtifactStore(t.connect(sys.argv[1]), 'task', 'finger')
artifact = store.get(1)
print('ready', flush=True)
print(t.ArtifactCache(pathlib.Path(sys.argv[2])).fetch(store, artifact), flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def files(tmp_path: Path) -> list[Path]:
    return sorted(p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.name != "lock")


def downloads(client: redis.Redis, chunks: int) -> float:
    """Returns the number of downloads; every chunk is one GET."""
    return int(client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]) / chunks


def published(store: ArtifactStore, source: Path, count: int) -> list[Artifact]:
    return [store.publish(source, i) for i in range(count)]


def test_artifact_is_downloaded_once_unless_its_size_is_wrong(store, source, cache, client) -> None:
    artifact = store.publish(source, 1)
    client.config_resetstat()
    path = cache.fetch(store, artifact)
    assert path.read_bytes() == source.read_bytes()
    assert cache.fetch(store, artifact) == path
    assert downloads(client, artifact.chunks) == 1
    for content in (b"", b"short", bytes(26)):
        path.write_bytes(content)
        assert cache.fetch(store, artifact).read_bytes() == source.read_bytes()


def test_concurrent_processes_share_one_download(redis_url, store, source, tmp_path, client):
    artifact = store.publish(source, 1)
    client.config_resetstat()
    folder = tmp_path / "cache" / "task" / "finger"
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", FETCH, redis_url, str(tmp_path / "cache")]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # no download before both have requested one
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        ready = [process.stdout.readline() for process in both if process.stdout]
    answers = {process.communicate()[0].strip() for process in both}
    assert (ready, [process.returncode for process in both]) == (["ready\n", "ready\n"], [0, 0])
    assert answers == {str(path) for path in files(tmp_path)}
    assert len(answers) == 1
    assert downloads(client, artifact.chunks) == 1


def test_damaged_or_killed_download_leaves_no_file(store, source, cache, tmp_path, client) -> None:
    damaged, first, second = published(store, source, 3)
    client.setrange("tasc:{task}:index:finger:chunk:1:1", 0, b"x")
    with pytest.raises(CorruptArtifact):
        cache.fetch(store, damaged)
    assert files(tmp_path) == []
    left = cache.fetch(store, first).parent / "old.partial"
    left.touch()
    cache.fetch(store, second)
    assert not left.exists()
    assert len(files(tmp_path)) == 2


def test_mapped_file_stays_readable_after_eviction(store, source, tmp_path) -> None:
    cache = ArtifactCache(tmp_path / "cache", keep=1)
    first, second = published(store, source, 2)
    path = cache.fetch(store, first)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        newest = cache.fetch(store, second)
        assert files(tmp_path) == [newest]
        assert mapped[:] == source.read_bytes()


def test_least_recently_fetched_artifact_is_evicted_first(store, source, cache, tmp_path) -> None:
    first, second, third = published(store, source, 3)
    rolled_back_to, other = cache.fetch(store, first), cache.fetch(store, second)
    for path in (rolled_back_to, other):
        os.utime(path, (0, 0))
    cache.fetch(store, first)
    newest = cache.fetch(store, third)
    assert files(tmp_path) == [rolled_back_to, newest]


def test_artifact_with_a_reused_version_number_is_downloaded_again(
    store, source, cache, client
) -> None:
    cache.fetch(store, store.publish(source, 1))
    client.flushall()
    source.write_bytes(bytes(25))
    again = store.publish(source, 1)
    assert again.version == 1
    assert cache.fetch(store, again).read_bytes() == bytes(25)


def test_error_of_a_lock_that_is_held_too_long_names_the_lock(store, source, tmp_path) -> None:
    artifact = store.publish(source, 1)
    cache = ArtifactCache(tmp_path / "cache", lock_timeout_s=0.0)
    folder = tmp_path / "cache" / "task" / "finger"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refused(StoreError, str(folder / "lock")):
            cache.fetch(store, artifact)
    assert cache.fetch(store, artifact).is_file()
