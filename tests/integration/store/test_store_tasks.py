"""Task records in a real Redis."""

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from tasc_store import (
    ArtifactStore,
    CorpusRow,
    CorpusStore,
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


def test_versions_grow_and_every_one_stays_readable(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    assert [tasks.put(FIRST), tasks.put(SECOND)] == [1, 2]
    assert tasks.versions("intents") == [1, 2]
    assert tasks.get("intents") == tasks.get("intents", 2) == SECOND
    assert tasks.get("intents", 1) == FIRST


def test_putting_the_newest_again_adds_nothing(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    assert [tasks.put(FIRST), tasks.put(FIRST)] == [1, 1]


def test_putting_an_older_record_rolls_back_by_a_new_version(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    assert [tasks.put(FIRST), tasks.put(SECOND), tasks.put(FIRST)] == [1, 2, 3]
    assert tasks.get("intents") == FIRST


def test_an_unknown_task_is_answered_with_the_known_ones(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    with pytest.raises(UnknownTask, match="none yet"):
        tasks.get("intents")
    tasks.put(FIRST)
    tasks.put(replace(FIRST, name="answers"))
    assert tasks.names() == ["answers", "intents"]
    with pytest.raises(UnknownTask, match=r"'nothing' at redis://.*: answers, intents$"):
        tasks.versions("nothing")


@pytest.mark.parametrize("version", [-1, 0, 2])
def test_an_unknown_version_is_answered_with_the_range(client: redis.Redis, version: int) -> None:
    tasks = TaskStore(client)
    tasks.put(FIRST)
    with pytest.raises(UnknownVersion, match=f"1 to 1, not {version}"):
        tasks.get("intents", version)


def test_a_version_used_again_is_the_newest_as_it_was_written(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    by_hand = '{"name": "intents", "model": "m", "fingerprint": "f", "template": "{input}"}'
    client.rpush("tasc:{intents}:records", by_hand)
    assert tasks.put(SECOND) == 2
    assert tasks.use("intents", 1) == 3
    assert tasks.versions("intents") == [1, 2, 3]
    assert tasks.get("intents", 3) == tasks.get("intents", 1) == tasks.get("intents")
    assert client.lindex("tasc:{intents}:records", -1) == by_hand.encode()


def test_using_the_newest_again_adds_nothing(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    tasks.put(FIRST)
    tasks.put(SECOND)
    assert [tasks.use("intents", version) for version in (2, 1, 1, 3)] == [2, 3, 3, 3]


@pytest.mark.parametrize("version", [-1, 0, 2])
def test_only_a_version_there_is_can_be_used(client: redis.Redis, version: int) -> None:
    tasks = TaskStore(client)
    tasks.put(FIRST)
    with pytest.raises(UnknownVersion, match="1 to 1"):
        tasks.use("intents", version)
    with pytest.raises(UnknownTask, match="intents"):
        tasks.use("nothing", version)
    assert tasks.versions("intents") == [1]


def test_a_record_goes_in_behind_the_version_its_writer_saw_or_not_at_all(
    client: redis.Redis,
) -> None:
    tasks = TaskStore(client)
    assert tasks.put(FIRST, after=0) == 1
    assert tasks.put(SECOND, after=1) == 2
    assert tasks.put(SECOND, after=1) == 2  # as a call repeated whose answer was lost
    for after in (0, 1, 3):
        with pytest.raises(TaskChanged, match=f"2 versions by now, not {after}"):
            tasks.put(FIRST, after=after)
    assert tasks.versions("intents") == [1, 2]


def test_the_newest_of_all_tasks_come_with_their_versions(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    assert tasks.newest() == []
    other = replace(FIRST, name="answers")
    for record in (FIRST, SECOND, other):
        tasks.put(record)
    client.sadd("tasc:tasks", "deleted-meanwhile")
    assert tasks.newest() == [(1, other), (2, SECOND)]


def test_a_record_that_is_none_is_named_by_its_task(client: redis.Redis) -> None:
    TaskStore(client).put(FIRST)
    client.rpush("tasc:{intents}:records", "[]")
    with pytest.raises(ValueError, match="record of task intents cannot be read"):
        TaskStore(client).newest()


def fill(client: redis.Redis, name: str, folder: Path) -> None:
    """A record, a corpus, and for two tokenizers an announced index and chunks of a killed one."""
    TaskStore(client).put(replace(FIRST, name=name))
    CorpusStore(client, name).append([CorpusRow(str(i), "in", "out") for i in range(30)])
    (folder / "index").write_bytes(bytes(100))
    for fingerprint in ("f" * 32, "g"):
        artifacts = ArtifactStore(client, name, fingerprint, chunk_bytes=10)
        artifacts.announce(artifacts.publish(folder / "index", 30).version)
        client.set(f"tasc:{{{name}}}:index:{fingerprint}:chunk:2:0", b"left")


def content(client: redis.Redis) -> dict[bytes, bytes | None]:
    """All keys but the set of names, whose bytes depend on the order they came in."""
    return {key: client.dump(key) for key in client.scan_iter() if key != b"tasc:tasks"}


def test_a_deleted_task_leaves_nothing_and_takes_nothing_of_others(
    client: redis.Redis, tmp_path: Path
) -> None:
    tasks = TaskStore(client)
    others = ("b", "ba", "a.b", "aa", "a-")
    for name in others:
        fill(client, name, tmp_path)
    client.set("tasc:other", 1)
    before = content(client)
    fill(client, "a", tmp_path)
    assert len(client.keys("tasc:{a}:*")) > 20
    tasks.delete("a")
    assert content(client) == before
    assert tasks.names() == sorted(others)
    with pytest.raises(UnknownTask, match="'a'"):
        tasks.delete("a")
    fill(client, "a", tmp_path)
    assert tasks.versions("a") == [1]


def test_a_task_of_more_keys_than_one_look_sees_goes_whole(client: redis.Redis) -> None:
    tasks = TaskStore(client)
    tasks.put(FIRST)
    with client.pipeline() as many:
        for i in range(5000):
            many.set(f"tasc:{{intents}}:index:f:chunk:1:{i}", b"")
        many.execute()
    tasks.delete("intents")
    assert client.keys() == []


def test_a_task_whose_corpus_others_draft_from_stays_whole(
    client: redis.Redis, tmp_path: Path
) -> None:
    tasks = TaskStore(client)
    fill(client, "shared", tmp_path)
    for name in ("one", "two", "own"):
        tasks.put(replace(FIRST, name=name, corpus="own" if name == "own" else "shared"))
    before = set(client.keys())
    with pytest.raises(TaskInUse, match="one, two draft from the corpus of task shared"):
        tasks.delete("shared")
    assert set(client.keys()) == before
    tasks.put(replace(FIRST, name="one"))
    for name in ("two", "own", "shared"):  # one drafts from its own now: what it was counts no more
        tasks.delete(name)
    assert tasks.names() == ["one"]


@pytest.mark.parametrize("step", ["unlink", "srem"])
def test_a_deletion_cut_short_can_be_done_again(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
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
