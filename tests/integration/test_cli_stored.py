"""Tests ``tasc index``, ``refresh`` and ``key``, which show, change and renew stored data."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from serving import publish

from support import record_of
from tasc_command import InProcess
from tasc_draft import DraftIndex, read_index
from tasc_draft.index.draft_index import INDEX_FILE
from tasc_jobs import hints
from tasc_jobs.cli import index as cli_refresh
from tasc_store import ApiKeys, ArtifactStore, EmbeddedRedis, TaskRecord, TaskStore, connect, redact
from tasc_store.access import digest_of
from tiny import make_tokenizer

pytestmark = pytest.mark.redis
Run = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli-index")
    make_tokenizer(made)
    return made


@pytest.fixture
def record(client: redis.Redis, folder: Path, name: str) -> TaskRecord:
    record = record_of(folder, name)
    TaskStore(client).put(record)
    return record


@pytest.fixture
def store(client: redis.Redis, record: TaskRecord, tmp_path: Path) -> ArtifactStore:
    """A store with three versions, the last one current; services would refuse their content."""
    found = ArtifactStore(client, record.name, record.fingerprint)
    path = tmp_path / "index"
    path.write_bytes(b"no index")
    for forecast in (None, 4.25, None):
        found.announce(found.publish(path, 1234, forecast=forecast).version)
    return found


@pytest.fixture
def run(run: Run, redis_url: str) -> Run:
    """The command on the shared store."""
    return lambda *args, code=0: run(*args, "--redis-url", redis_url, code=code)


@pytest.fixture
def key(tasc_here: InProcess) -> Run:
    """``tasc key`` on the shared store."""
    return lambda *args, code=0: tasc_here.run("key", *args, code=code)


@pytest.fixture
def keys(client: redis.Redis) -> ApiKeys:
    return ApiKeys(client)


def test_index_versions_are_listed_and_made_current(
    run: Run, record: TaskRecord, store: ArtifactStore
) -> None:
    store.announce(1)
    lines = run("index", "list", record.name).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert all("1,234 rows" in line for line in lines)
    assert ["current" in line for line in lines] == [True, False, False]
    run("index", "use", record.name, 3)
    printed = json.loads(run("index", "list", record.name, "--json"))["versions"]
    assert [v["version"] for v in printed if v["current"]] == [3]
    assert [v["forecast"] for v in printed] == [None, 4.25, None]


def test_exported_index_is_the_version_asked_for(run, record, client, tmp_path) -> None:
    store = ArtifactStore(client, record.name, record.fingerprint)
    asked, folder = ("index", "export", record.name, "--to"), tmp_path / "a" / "folder"
    assert "tasc build-index" in run(*asked, folder, code=1)
    assert not folder.exists()
    for size in (50, 70):
        publish(store, DraftIndex.empty(record.fingerprint, size))
    run(*asked, folder)
    assert read_index(folder / INDEX_FILE).vocab_size == 70
    printed = json.loads(run(*asked, folder, "--version", 1, "--json"))
    assert Path(printed["path"]) == folder / INDEX_FILE
    assert (printed["version"], printed["sha256"]) == (1, store.get(1).sha256)
    assert read_index(folder / INDEX_FILE).vocab_size == 50
    assert os.listdir(folder) == [INDEX_FILE]


def test_refused_export_leaves_the_earlier_file(run, record, store, tmp_path) -> None:
    asked = ("index", "export", record.name, "--to")
    (tmp_path / INDEX_FILE).write_text("of before")
    assert "version 3 of the index" in run(*asked, tmp_path, code=1)  # of the version in the store
    assert "existing versions: 1, 2, 3" in run(*asked, tmp_path, "--version", 9, code=1)
    assert (tmp_path / INDEX_FILE).read_text() == "of before"
    assert "--to" in run(*asked, tmp_path / INDEX_FILE, code=2)
    assert "--to" in run(*asked, tmp_path / INDEX_FILE / "inside", code=2)


def test_hinted_commands_name_the_store_and_are_quoted(
    in_process, record, redis_url, tmp_path, monkeypatch
):
    run = in_process.run
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    asked = ("index", "list", record.name)
    (hint,) = re.findall("`(.*)`", run(*asked, "--redis-url", redis_url))
    assert shlex.split(hint) == ["tasc", "build-index", record.name, "--redis-url", redis_url]
    monkeypatch.delenv("REDIS_URL")
    folder = tmp_path / "of mine"
    monkeypatch.setenv("TASC_DATA_DIR", str(folder))
    with EmbeddedRedis.start(folder) as server, connect(server.url) as client:
        TaskStore(client).put(record)
    assert "--data-dir" not in run(*asked)
    monkeypatch.delenv("TASC_DATA_DIR")
    (hint,) = re.findall("`(.*)`", run(*asked, "--data-dir", folder))
    assert shlex.split(hint)[3:] == ["--data-dir", str(folder)]


def test_hinted_command_shows_no_password() -> None:
    hints.use_store(redact("redis://user:secret@host:6379/0"), None)
    message = hints.command("task", "use", "t", 1)
    hints.use_store(None, None)
    assert message == "tasc task use t 1 --redis-url 'redis://***@host:6379/0'"
    assert hints.command("task", "use", "t", 1) == "tasc task use t 1"


def test_repeated_refresh_survives_failures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            sys.exit(143)

    monkeypatch.setattr(cli_refresh.time, "sleep", sleep)
    message = run("refresh", "nothing", "--every", 60, code=143)
    assert message.count("refresh nothing failed, next try in 60 s: no task 'nothing'") == 3
    assert slept == [60.0] * 3


def test_api_key_is_created_listed_and_revoked(key: Run, keys: ApiKeys, name: str) -> None:
    made = key("create", name, "--tasks", "one, two", "--requests-per-minute", 60)
    secret = made.strip()
    assert made == f"{secret}\n"
    known = keys.find(digest_of(secret))
    assert (known.name, known.tasks, known.requests_per_minute) == (name, ("one", "two"), 60)
    text = key("list")
    (line,) = (row.split("\t") for row in text.splitlines() if name in row)
    assert (line[:5], line[-1]) == ([known.id, name, "one,two", "60", "-"], "open")
    assert secret not in text
    revoked = json.loads(key("revoke", known.id, "--json"))
    assert (revoked["id"], revoked["revoked"]) == (known.id, True)
    assert keys.find(digest_of(secret)).revoked
    listed = json.loads(key("list", "--json"))["keys"]
    assert [k["revoked"] for k in listed if k["name"] == name] == [True]
    assert secret not in json.dumps(listed)
