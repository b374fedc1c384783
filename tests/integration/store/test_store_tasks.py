"""Task records in a real Redis."""

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from support import refused
from tasc_store import (
    ArtifactStore,
    CorpusRow,
    CorpusStore,
    Newest,
    TaskChanged,
    TaskInUse,
    TaskRecord,
    TaskStore,
    UnknownTask,
    UnknownVersion,
)

pytestmark = pytest.mark.redis
FIRST = TaskRecord("intents", "org/model", "f" * 32, "{input}", stop=("\n",))
SECOND = replace(FIRST, max_tokens=8)
BAD_DRAFT = FIRST.to_json().replace('"n_max":6', '"n_max":"many"')


@pytest.fixture
def tasks(client: redis.Redis) -> TaskStore:
    return TaskStore(client)


def test_changed_record_adds_a_version_and_old_versions_stay_readable(tasks: TaskStore) -> None:
    assert [tasks.put(record) for record in (FIRST, FIRST, SECOND)] == [1, 1, 2]
    assert tasks.versions("intents") == [1, 2]
    assert tasks.get("intents") == tasks.get("intents", 2) == SECOND
    assert tasks.get("intents", 1) == FIRST
    assert tasks.put(FIRST) == 3
    assert tasks.get("intents") == FIRST


def test_error_of_an_unknown_task_lists_the_known_tasks(tasks: TaskStore) -> None:
    with pytest.raises(UnknownTask):
        tasks.get("intents")
    tasks.put(FIRST)
    tasks.put(replace(FIRST, name="answers"))
    assert tasks.names() == ["answers", "intents"]
    with refused(UnknownTask, "nothing", "redis://", "answers, intents"):
        tasks.versions("nothing")


def test_old_version_that_is_used_again_becomes_the_newest_version(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    by_hand = '{"name": "intents", "model": "m", "fingerprint": "f", "template": "{input}"}'
    client.rpush("tasc:{intents}:records", by_hand)
    assert tasks.put(SECOND) == 2
    assert tasks.use("intents", 1) == 3
    assert tasks.versions("intents") == [1, 2, 3]
    assert tasks.get("intents", 3) == tasks.get("intents", 1) == tasks.get("intents")
    assert client.lindex("tasc:{intents}:records", -1) == by_hand.encode()


def test_using_the_newest_version_again_adds_no_version(tasks: TaskStore) -> None:
    tasks.put(FIRST)
    tasks.put(SECOND)
    assert [tasks.use("intents", version) for version in (2, 1, 1, 3)] == [2, 3, 3, 3]


@pytest.mark.parametrize("version", [-1, 0, 2])
def test_unknown_version_cannot_be_read_or_used(tasks: TaskStore, version: int) -> None:
    tasks.put(FIRST)
    for act in (tasks.get, tasks.use):
        with refused(UnknownVersion, str(version)):
            act("intents", version)
    with refused(UnknownTask, "intents"):
        tasks.use("nothing", version)
    assert tasks.versions("intents") == [1]


def test_record_is_added_only_if_its_writer_read_the_newest_version(tasks: TaskStore) -> None:
    assert tasks.put(FIRST, after=0) == 1
    assert tasks.put(SECOND, after=1) == 2
    assert tasks.put(SECOND, after=1) == 2  # like a repeated call after a lost response
    for after in (0, 1, 3):
        with refused(TaskChanged, "intents", str(after)):
            tasks.put(FIRST, after=after)
    assert tasks.versions("intents") == [1, 2]


def test_newest_records_of_all_tasks_have_their_versions(client, tasks) -> None:
    assert tasks.newest() == []
    other = replace(FIRST, name="answers")
    for record in (FIRST, SECOND, other):
        tasks.put(record)
    client.sadd("tasc:tasks", "deleted-meanwhile")
    assert tasks.newest() == [Newest("answers", 1, other), Newest("intents", 2, SECOND)]


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, BAD_DRAFT])
def test_invalid_record_does_not_affect_other_tasks(client: redis.Redis, text: str) -> None:
    tasks = TaskStore(client)
    for name in ("intents", "other"):
        tasks.put(replace(FIRST, name=name))
    client.rpush("tasc:{intents}:records", text)
    with refused(ValueError, "intents"):
        tasks.get("intents")
    unreadable, other = tasks.newest()
    assert (unreadable.name, unreadable.version) == ("intents", 2)
    assert isinstance(unreadable.record, ValueError)
    assert other.record == replace(FIRST, name="other")
    tasks.delete("other")
    tasks.delete("intents")
    assert client.keys() == []


def test_record_of_a_later_release_protects_its_corpus(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    tasks.put(FIRST)
    tasks.put(replace(FIRST, name="other"))
    client.rpush("tasc:{other}:records", '{"corpus": "intents", "new": 1}')
    with refused(TaskInUse, "other", "intents"):
        tasks.delete("intents")


def fill(client: redis.Redis, name: str, folder: Path) -> None:
    """Writes a record, a corpus, and for two tokenizers an index and chunks of a killed upload."""
    TaskStore(client).put(replace(FIRST, name=name))
    CorpusStore(client, name).append([CorpusRow(str(i), "in", "out") for i in range(30)])
    (folder / "index").write_bytes(bytes(100))
    for fingerprint in ("f" * 32, "g"):
        artifacts = ArtifactStore(client, name, fingerprint, chunk_bytes=10)
        artifacts.announce(artifacts.publish(folder / "index", 30).version)
        client.set(f"tasc:{{{name}}}:index:{fingerprint}:chunk:2:0", b"left")


def content(client: redis.Redis) -> dict[bytes, bytes | None]:
    """Returns all keys except the set of names, whose bytes depend on the order of insertion."""
    return {key: client.dump(key) for key in client.scan_iter() if key != b"tasc:tasks"}


def test_deletion_removes_all_data_of_one_task(client: redis.Redis, tmp_path: Path) -> None:
    tasks = TaskStore(client)
    others = ("b", "ba", "a.b", "aa", "a-")
    for name in others:
        fill(client, name, tmp_path)
    client.set("tasc:other", 1)
    before = content(client)
    fill(client, "a", tmp_path)
    assert len(client.keys("tasc:{a}:*")) > 20
    # More keys than one scan of Redis returns.
    client.mset({f"tasc:{{a}}:index:f:chunk:1:{i}": b"" for i in range(5000)})
    tasks.delete("a")
    assert content(client) == before
    assert tasks.names() == sorted(others)
    with refused(UnknownTask, "'a'"):
        tasks.delete("a")
    fill(client, "a", tmp_path)
    assert tasks.versions("a") == [1]


def test_task_whose_corpus_other_tasks_use_cannot_be_deleted(
    client: redis.Redis, tmp_path: Path
) -> None:
    tasks = TaskStore(client)
    fill(client, "shared", tmp_path)
    for name in ("one", "two", "own"):
        tasks.put(replace(FIRST, name=name, corpus="own" if name == "own" else "shared"))
    before = set(client.keys())
    with refused(TaskInUse, "one, two", "shared"):
        tasks.delete("shared")
    assert set(client.keys()) == before
    tasks.put(replace(FIRST, name="one"))
    for name in ("two", "own", "shared"):  # only the newest version of "one" counts
        tasks.delete(name)
    assert tasks.names() == ["one"]


def test_rows_ingested_during_a_deletion_are_removed(client, tmp_path, monkeypatch) -> None:
    fill(client, "a", tmp_path)
    tasks, corpus = TaskStore(client), CorpusStore(client, "a")
    done = client.srem

    def late(*args: str) -> None:
        done(*args)
        assert corpus.append([CorpusRow("late", "in", "out")]).added == 1

    monkeypatch.setattr(client, "srem", late)
    tasks.delete("a")
    assert client.keys() == []


def test_data_without_a_record_can_be_deleted(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    tasks.put(FIRST)
    before = client.keys()
    CorpusStore(client, "a").append([CorpusRow("late", "in", "out")])
    assert tasks.left("a")
    tasks.delete("a")
    assert not tasks.left("a")
    assert client.keys() == before
    with refused(UnknownTask, "'a'"):
        tasks.delete("a")
    with refused(ValueError, "'*'"):
        tasks.delete("*")
    assert client.keys() == before


def test_named_corpus_must_be_a_task_or_have_rows(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    user = replace(FIRST, corpus="shared")
    for record in (user, FIRST):
        tasks.put(record)
    with refused(UnknownTask, "'shared'"):
        tasks.use("intents", 1)
    assert tasks.versions("intents") == [1, 2]
    tasks.require_corpus(FIRST)
    tasks.require_corpus(replace(FIRST, corpus="intents"))
    CorpusStore(client, "shared").append([CorpusRow("k", "in", "out")])
    assert tasks.use("intents", 1) == 3
    tasks.put(FIRST)
    tasks.delete("shared")
    tasks.put(replace(FIRST, name="shared"))
    assert tasks.use("intents", 1) == 5


@pytest.mark.parametrize("step", ["unlink", "srem"])
def test_interrupted_deletion_can_be_repeated(client, tmp_path, monkeypatch, step) -> None:
    fill(client, "a", tmp_path)
    tasks = TaskStore(client)
    done = getattr(client, step)

    def killed(*args: bytes) -> None:
        done(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client, step, killed)
        with pytest.raises(KeyboardInterrupt):
            tasks.delete("a")
    assert client.keys() != []
    tasks.delete("a")
    assert client.keys() == []
