"""Task records in a real Redis."""

from dataclasses import replace

import pytest
import redis

from tasc_store import TaskRecord, TaskStore, UnknownTask, UnknownVersion

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
