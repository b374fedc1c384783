"""Tests a real Redis server, started as deployed, and the permissions of its user."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from killable import redis_answers
from support import eventually, free_port
from tasc_serve.metrics.discovery import MetricsPort, live_targets
from tasc_store import (
    ArtifactStore,
    CorpusRow,
    CorpusStore,
    StoreError,
    StoreUnreachable,
    TaskRecord,
    TaskStore,
    connect,
)
from tasc_store.embedded import redis_binaries

ROOT = Path(__file__).parents[2]
SCRIPTED = re.compile(r"redis\.p?call\(\s*'(\w+)'")
REFUSED = [
    "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET dir", "ACL LIST", "SHUTDOWN",
    "SCRIPT FLUSH", "CLIENT LIST", "MONITOR", "REPLICAOF a 1", "SAVE", "GET other",
    "SET tascother 1", "PUBLISH other 1", "MIGRATE a 1 tasc:a 0 1", "SORT tasc:a",
]  # fmt: skip

pytestmark = pytest.mark.redis


@contextmanager
def running(folder: Path, port: int) -> Iterator[str]:
    """The server started by ``redis-start.sh`` on loopback; the URL of its user."""
    (binary, *_) = redis_binaries()
    own = {"PATH": f"{binary.parent}:{os.environ['PATH']}", "REDIS_PASSWORD": "p w:/@"}
    where = f"--port {port} --bind 127.0.0.1 --dir {folder}".split()
    with (folder / "log").open("ab") as log:
        command = ["sh", str(ROOT / "deploy" / "redis-start.sh"), *where]
        process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)
    with process:
        try:
            url = f"redis://tasc:p%20w%3A%2F%40@127.0.0.1:{port}/0"
            eventually(lambda: redis_answers(url))
            yield url
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("redis"), free_port()) as found:
        yield found


@pytest.mark.parametrize("user", ["", "tasc:wrong@", "default:@"])
def test_default_user_and_wrong_passwords_cannot_log_in(url, user):
    with pytest.raises(StoreUnreachable):
        connect(f"redis://{user}{url.split('@')[1]}")


@pytest.mark.parametrize("command", REFUSED)
def test_service_user_cannot_run_a_dangerous_command(url, command):
    with connect(url) as client, pytest.raises(StoreError, match="forbids"):
        client.execute_command(*command.split())


def test_stores_work_as_the_service_user(url, tmp_path: Path):
    source = tmp_path / "source"
    source.write_bytes(b"an index")
    record = TaskRecord(name="t", model="m", fingerprint="f", template="{input}")
    with connect(url) as client:
        tasks, corpus = TaskStore(client), CorpusStore(client, "t")
        tasks.put(record)
        row = CorpusRow("1", "a", "b")
        assert (corpus.append([row]).added, corpus.read(0, 1)) == (1, [row])
        artifacts = ArtifactStore(client, "t", "f")
        first = artifacts.publish(source, corpus_rows=1)
        artifacts.announce(first.version)
        assert artifacts.current() == first
        artifacts.download(first, tmp_path / "copy")
        artifacts.announce(artifacts.publish(source, corpus_rows=1).version)
        assert (artifacts.prune(1), tasks.get("t")) == ([first.version], record)
        tasks.delete("t")
        assert tasks.names() == []


def test_service_user_can_list_metrics_ports(url):
    with connect(url) as client:
        with MetricsPort(client, CollectorRegistry(), host="127.0.0.1", ttl_s=15) as port:
            assert live_targets(client) == [port.target]
        assert live_targets(client) == []


def test_service_user_can_run_every_command_of_our_lua_scripts(url):
    sources = [p.read_text("utf-8") for p in ROOT.glob("services/**/*.py")]
    used = {name for text in sources for name in SCRIPTED.findall(text)}
    assert len(used) >= 15
    with connect(url) as client:
        known = client.command()
        for name in sorted(used):
            arity = known[name.lower()]["arity"]
            try:
                client.execute_command(name, *["tasc:{x}"] * (abs(arity) - 1))
            except StoreError as error:  # an allowed command may refuse these arguments
                if "forbids a command" in str(error):
                    pytest.fail(f"users.acl forbids {name}")


def test_acknowledged_writes_survive_a_restart(tmp_path: Path):
    port = free_port()
    with running(tmp_path, port) as url, connect(url) as client:
        CorpusStore(client, "t").append([CorpusRow("1", "a", "b")])
    with running(tmp_path, port) as url, connect(url) as client:
        assert len(CorpusStore(client, "t")) == 1


def test_error_of_a_start_without_a_password_names_the_missing_variable():
    command, env = ["sh", str(ROOT / "deploy" / "redis-start.sh")], {"PATH": os.environ["PATH"]}
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ran.returncode != 0
    assert "REDIS_PASSWORD" in ran.stderr


def test_shipped_files_contain_no_password():
    shipped = [(ROOT / "deploy" / name).read_text("utf-8") for name in ("redis.conf", "users.acl")]
    assert all("requirepass" not in text and " >" not in text for text in shipped)
    assert "#REDIS_PASSWORD_SHA256" in shipped[1]
