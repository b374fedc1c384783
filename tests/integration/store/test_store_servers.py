"""Tests that a local server ends with its process, and that errors have the server's URL."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support import eventually, refused
from tasc_store import (
    ApiKeys,
    Artifact,
    ArtifactStore,
    CorpusRow,
    CorpusStore,
    EmbeddedRedis,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreTooOld,
    StoreUnreachable,
    TaskRecord,
    TaskStore,
    connect,
    open_url,
)
from tasc_store.embedded import redis_binaries

pytestmark = pytest.mark.redis


# The thread that starts the server ends before the process does: the server must not end with it.
ORPHAN = """
import sys, threading, tasc_store as t
def start():
    server = t.EmbeddedRedis.start()
    folder = t.connect(server.url).config_get('dir')['dir']
    print(server.pid, server.url, folder, flush=True)
starter = threading.Thread(target=start)
starter.start()
starter.join()
print('joined', flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders of the test's process."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("REDIS_URL", raising=False)
    return folder


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def parent(temporary: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a parent's death")
def test_embedded_server_ends_with_its_parent_process_not_with_a_thread(parent) -> None:
    assert parent.stdout is not None
    pid, url, _ = parent.stdout.readline().split()
    assert parent.stdout.readline() == "joined\n"
    with connect(url) as client:
        assert client.info("server")["process_id"] == int(pid)
    parent.kill()
    eventually(lambda: gone(int(pid)))
    with pytest.raises(StoreUnreachable):
        connect(url)


def test_embedded_server_ends_without_close(parent: subprocess.Popen[str], temporary: Path) -> None:
    assert parent.stdout is not None
    pid, _, directory = parent.stdout.readline().split()
    assert Path(directory).parent == temporary
    parent.communicate()
    assert parent.returncode == 0
    assert gone(int(pid))
    assert not Path(directory).exists()


@pytest.mark.parametrize("binary", redis_binaries(), ids=str)
def test_each_installed_server_program_works(binary: Path, temporary: Path) -> None:
    with EmbeddedRedis.start(binary=binary) as server, connect(server.url) as client:
        assert client.set("key", "value")
        assert len(list(temporary.iterdir())) == 1
    assert gone(server.pid)
    assert list(temporary.iterdir()) == []
    server.close()


def test_directory_keeps_data_and_allows_one_server_at_a_time(tmp_path: Path) -> None:
    data, way_out = tmp_path / "data", "--data-dir (TASC_DATA_DIR)"
    with EmbeddedRedis.start(data) as first, connect(first.url) as client:
        client.set("key", "value")
        with refused(StoreError, str(data), f"REDIS_URL={first.url} ", way_out):
            EmbeddedRedis.start(data)
    with EmbeddedRedis.start(data) as second, connect(second.url) as client:
        with refused(StoreError, f"REDIS_URL={second.url} "):  # the error names the present server
            EmbeddedRedis.start(data)
        assert client.get("key") == b"value"


def test_error_of_a_failing_server_program_has_its_log(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "redis-server"
    script.write_text("#!/bin/sh\necho cannot do\nexit 1\n")
    script.chmod(0o755)
    with refused(StoreError, "cannot do"):
        EmbeddedRedis.start(binary=script)
    assert list(temporary.iterdir()) == []


def test_server_uses_another_port_if_its_port_is_taken(tmp_path: Path, temporary: Path) -> None:
    script, flag = tmp_path / "redis-server", tmp_path / "flag"
    taken = f"[ -e {flag} ] || {{ touch {flag}; echo Address already in use; exit 1; }}"
    script.write_text(f'#!/bin/sh\n{taken}\nexec {redis_binaries()[0]} "$@"\n')
    script.chmod(0o755)
    with EmbeddedRedis.start(binary=script) as server, connect(server.url) as client:
        assert client.ping()
        assert len(list(temporary.iterdir())) == 1


def test_temporary_server_ends_with_the_block_that_started_it(temporary: Path) -> None:
    with open_url(None) as url, redis.Redis.from_url(url) as client:
        assert client.ping()
    assert list(temporary.iterdir()) == []
    with pytest.raises(StoreUnreachable):
        connect(url)


RECORD = TaskRecord("task", "m", "finger", "{input}")
Write = Callable[[redis.Redis, Path], object]


def fill(client: redis.Redis, source: Path) -> Artifact:
    """Writes the state before the writes below: a task of two versions, a published index."""
    for limit in (1, 2):
        TaskStore(client).put(replace(RECORD, name="old", max_tokens=limit))
    return ArtifactStore(client, "task", "finger").publish(source, 1)


WRITES: dict[str, Write] = {
    "put": lambda client, _: TaskStore(client).put(RECORD),
    "use": lambda client, _: TaskStore(client).use("old", 1),
    "append": lambda client, _: CorpusStore(client, "task").append([CorpusRow("k", "i", "o")]),
    "publish": lambda client, source: ArtifactStore(client, "task", "finger").publish(source, 1),
    "announce": lambda client, _: ArtifactStore(client, "task", "finger").announce(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_full_redis_is_reported_and_keeps_its_data(redis_url, client, source, write) -> None:
    fill(client, source)
    client.config_set("maxmemory", 1)
    before = set(client.keys())
    with connect(redis_url) as full, refused(StoreFull, redis_url):
        write(full, source)
    assert set(client.keys()) == before
    TaskStore(client).delete("old")
    assert not client.exists("tasc:{old}:records")


def test_artifact_that_fills_redis_is_removed(client: redis.Redis, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(8_000_000))
    store = ArtifactStore(client, "task", "finger", chunk_bytes=100_000)
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 2_000_000)
    with refused(StoreFull, "maxmemory"):
        store.publish(tmp_path / "large", 1)
    assert client.keys() == [b"tasc:{task}:index:finger:last"]


def test_read_only_replica_is_reported(redis_url, server, client, source) -> None:
    artifact = fill(client, source)
    client.config_set("repl-diskless-sync-delay", 0)  # Redis 7 waits 5 s for more replicas
    with connect(server.url) as replica:
        replica.replicaof("127.0.0.1", redis_url.rpartition(":")[2].removesuffix("/0"))
        eventually(lambda: ArtifactStore(replica, "task", "finger").versions() == [1])
        for write in (*WRITES.values(), lambda *_: connect(server.url)):
            with refused(StoreReadOnly, server.url):
                write(replica, source)
        assert ArtifactStore(replica, "task", "finger").get(1) == artifact


REFUSALS: dict[str, tuple[type[StoreError], str, int]] = {
    # A server's error, the exception for it, a word of the message, and the number of attempts.
    "READONLY You can't write against a read only replica.": (StoreReadOnly, "primary", 3),
    "NOREPLICAS Not enough good replicas to write.": (StoreReadOnly, "min-replicas-to-write", 3),
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": (
        *(StoreUnreachable, "lost its primary", 3),
    ),
    "LOADING Redis is loading the dataset in memory": (StoreUnreachable, "loading", 3),
    "NOAUTH Authentication required.": (StoreUnreachable, "login", 3),
    "MISCONF Redis is configured to save RDB snapshots, but": (StoreReadOnly, "disk", 1),
    "OOM command not allowed when used memory > 'maxmemory'.": (StoreFull, "maxmemory", 1),
    "NOPERM this user has no permissions to run the 'set' command": (StoreError, "ACL", 1),
    "MOVED 3999 127.0.0.1:6381": (StoreError, "cluster mode", 1),
    "ASK 3999 127.0.0.1:6381": (StoreError, "cluster mode", 1),
    "CROSSSLOT Keys in request don't hash to the same slot": (StoreError, "cluster mode", 1),
    "CLUSTERDOWN The cluster is down": (StoreError, "cluster mode", 1),
}


def test_lua_script_that_the_server_loses_twice_raises_a_store_error(
    redis_url, monkeypatch
) -> None:
    """As if the primary changed between the load of the script and its call."""
    with connect(redis_url) as connected:
        script = connected.register_script("return 1")
        monkeypatch.setattr(type(connected), "script_load", lambda self, text: "0" * 40)
        script.sha = "0" * 40
        with refused(StoreError, redis_url):
            script()


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.partition(" ")[0])
def test_refused_commands_are_retried_if_another_server_may_answer(
    redis_url, client, error
) -> None:
    kind, named, tries = REFUSALS[error]
    script = "redis.call('INCR', 'tries') return redis.error_reply(ARGV[1])"
    with connect(redis_url) as connected, refused(StoreError, redis_url, named) as caught:
        connected.eval(script, 0, error)
    assert type(caught.value) is kind
    assert int(client.get("tries")) == tries


def test_old_server_is_refused_and_silent_server_times_out(redis_url, monkeypatch) -> None:
    monkeypatch.setattr("tasc_store.client.OLDEST", (99, 0))
    with refused(StoreTooOld, redis_url, "99.0"):
        connect(redis_url)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with refused(StoreUnreachable, f":{port}/0"):
            connect(f"redis://127.0.0.1:{port}/0", timeout_s=0.05)


def test_unreachable_redis_is_reported(server: EmbeddedRedis, source: Path) -> None:
    uses: list[Write] = [
        *WRITES.values(),
        lambda client, _: TaskStore(client).get("task"),
        lambda client, _: TaskStore(client).names(),
        lambda client, _: TaskStore(client).newest(),
        lambda client, _: TaskStore(client).delete("task"),
        lambda client, _: ApiKeys(client).find("0" * 64),
        lambda client, _: len(CorpusStore(client, "task")),
        lambda client, _: CorpusStore(client, "task").read(0, 1),
        lambda client, _: ArtifactStore(client, "task", "finger").current(),
        lambda client, _: ArtifactStore(client, "task", "finger").other_fingerprints(),
    ]
    with connect(server.url) as client:
        server.close()
        for use in uses:
            with refused(StoreUnreachable, server.url):
                use(client, source)
