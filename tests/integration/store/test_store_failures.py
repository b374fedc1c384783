"""A full, read-only, absent, silent or locked Redis is told apart, by URL and without password."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support import eventually, refused
from tasc_store import (
    Artifact,
    ArtifactStore,
    CorpusRow,
    CorpusStore,
    EmbeddedRedis,
    StoreFull,
    StoreReadOnly,
    StoreTooOld,
    StoreUnreachable,
    TaskRecord,
    TaskStore,
    connect,
)

pytestmark = pytest.mark.redis
RECORD = TaskRecord("task", "m", "finger", "{input}")
Write = Callable[[redis.Redis, Path], object]


def _fill(client: redis.Redis, source: Path) -> Artifact:
    """What the writes below go on from: a task of two versions, a published index."""
    for limit in (1, 2):
        TaskStore(client).put(replace(RECORD, name="old", max_tokens=limit))
    return ArtifactStore(client, "task", "finger").publish(source, 1)


def _announce(client: redis.Redis, source: Path) -> None:
    store = ArtifactStore(client, "task", "finger")
    store.announce(store.versions()[-1])


WRITES: dict[str, Write] = {
    "put": lambda client, _: TaskStore(client).put(RECORD),
    "use": lambda client, _: TaskStore(client).use("old", 1),
    "append": lambda client, _: CorpusStore(client, "task").append([CorpusRow("k", "i", "o")]),
    "publish": lambda client, source: ArtifactStore(client, "task", "finger").publish(source, 1),
    "announce": _announce,
}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


@pytest.fixture
def unused_port() -> Iterator[int]:
    """Bound, so that nobody else takes it, but not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@every_write
def test_a_full_redis_is_named_and_nothing_goes_in(
    server: EmbeddedRedis, client: redis.Redis, source: Path, write: Write
) -> None:
    _fill(client, source)
    client.config_set("maxmemory", 1)
    before = set(client.keys())
    with connect(server.url) as full, refused(StoreFull, server.url):
        write(full, source)
    assert set(client.keys()) == before


def test_a_full_redis_lets_a_task_be_deleted(client: redis.Redis, source: Path) -> None:
    _fill(client, source)
    client.config_set("maxmemory", 1)
    TaskStore(client).delete("old")
    assert not client.exists("tasc:{old}:records")


def test_a_redis_that_becomes_full_during_a_publish_is_cleared_of_it(
    client: redis.Redis, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(8_000_000))
    store = ArtifactStore(client, "task", "finger", chunk_bytes=100_000)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 2_000_000)
    with refused(StoreFull, "maxmemory"):
        store.publish(tmp_path / "large", 1)
    assert client.keys() == [b"tasc:{task}:index:finger:last"]


@every_write
def test_a_read_only_replica_is_named(
    server: EmbeddedRedis,
    spare: EmbeddedRedis,
    client: redis.Redis,
    source: Path,
    write: Write,
) -> None:
    artifact = _fill(client, source)
    client.config_set("repl-diskless-sync-delay", 0)  # Redis 7 waits 5 s for more replicas
    with connect(spare.url) as replica:
        replica.replicaof("127.0.0.1", server.url.rpartition(":")[2].removesuffix("/0"))
        eventually(lambda: ArtifactStore(replica, "task", "finger").versions() == [1])
        with refused(StoreReadOnly, spare.url):
            write(replica, source)
        with refused(StoreReadOnly, spare.url):
            connect(spare.url)
        assert ArtifactStore(replica, "task", "finger").get(1) == artifact


def test_nobody_at_the_url_is_said_without_the_password(unused_port: int) -> None:
    with refused(StoreUnreachable, f"***@127.0.0.1:{unused_port}/0") as caught:
        connect(f"redis://user:s3cr3t@127.0.0.1:{unused_port}/0")
    assert "s3cr3t" not in str(caught.value)


def test_a_refused_login_is_said_without_the_password(spare: EmbeddedRedis) -> None:
    with connect(spare.url) as admin:
        admin.config_set("requirepass", "right")
    url = spare.url.replace("//", "//:s3cr3t@")
    with pytest.raises(StoreUnreachable) as caught:
        connect(url)
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(StoreUnreachable):
        connect(spare.url)
    connect(url.replace("s3cr3t", "right")).close()


def test_a_server_too_old_is_refused(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasc_store.client.OLDEST", (99, 0))
    with refused(StoreTooOld, server.url, "99.0"):
        connect(server.url)


def test_a_silent_server_is_given_up() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with refused(StoreUnreachable, f":{port}/0"):
            connect(f"redis://127.0.0.1:{port}/0", timeout_s=0.05)


@pytest.mark.parametrize(
    "use",
    [
        *WRITES.values(),
        lambda client, _: TaskStore(client).get("task"),
        lambda client, _: TaskStore(client).names(),
        lambda client, _: TaskStore(client).newest(),
        lambda client, _: TaskStore(client).delete("task"),
        lambda client, _: len(CorpusStore(client, "task")),
        lambda client, _: CorpusStore(client, "task").read(0, 1),
        lambda client, _: ArtifactStore(client, "task", "finger").current(),
        lambda client, _: ArtifactStore(client, "task", "finger").other_fingerprints(),
        lambda client, _: ArtifactStore(client, "task", "finger").wait(None, 5.0),
    ],
)
def test_a_vanished_redis_is_named_wherever_it_is_used(
    spare: EmbeddedRedis, source: Path, use: Write
) -> None:
    with connect(spare.url) as client:
        spare.close()
        with refused(StoreUnreachable, spare.url):
            use(client, source)
