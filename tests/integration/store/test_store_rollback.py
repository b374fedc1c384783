"""Which index version is current when several want to move the pointer, over a real Redis."""

import json
import threading
from pathlib import Path

import pytest
import redis

from tasc_store import ArtifactStore, IndexChanged, UnknownVersion

pytestmark = pytest.mark.redis


@pytest.fixture
def three(store: ArtifactStore, source: Path) -> ArtifactStore:
    """Three versions, the third of which is current."""
    for _ in range(3):
        store.publish(source, 1)
    store.announce(3)
    return store


def current(store: ArtifactStore) -> int:
    found = store.current()
    assert found is not None
    return found.version


def test_a_version_is_announced_only_behind_the_one_that_was_seen(
    store: ArtifactStore, source: Path
) -> None:
    first, second = store.publish(source, 1).version, store.publish(source, 1).version
    store.announce(first, after=0)
    with pytest.raises(IndexChanged, match="version none .* is not current any more"):
        store.announce(second, after=0)
    assert current(store) == first
    store.announce(second, after=first)
    assert current(store) == second
    with pytest.raises(UnknownVersion):
        store.announce(9, after=second)


def test_a_version_is_rolled_back_once_and_who_announces_it_again_has_the_last_word(
    three: ArtifactStore,
) -> None:
    assert three.rolled_back() == []
    assert three.roll_back(3, 2)
    assert (current(three), three.rolled_back()) == (2, [3])
    assert not three.roll_back(3, 1), "it is not current any more"
    three.announce(3)
    assert not three.roll_back(3, 2), "once is all"
    assert current(three) == 3


def test_of_many_replicas_one_rolls_back(three: ArtifactStore) -> None:
    done: list[bool] = []
    threads = [
        threading.Thread(target=lambda to=to: done.append(three.roll_back(3, to)))
        for to in (1, 2) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [False] * 7 + [True]
    assert current(three) in (1, 2)


def test_nobody_rolls_back_to_what_is_gone(three: ArtifactStore) -> None:
    three.delete(2)
    with pytest.raises(UnknownVersion, match="no index version 2"):
        three.roll_back(3, 2)
    assert (current(three), three.rolled_back()) == (3, [])


def test_who_waits_hears_of_a_roll_back(three: ArtifactStore) -> None:
    heard: list[object] = []
    thread = threading.Thread(target=lambda: heard.append(three.wait(3, 60.0)))
    thread.start()
    three.roll_back(3, 2)
    thread.join()
    assert heard == [three.get(2)]


def test_a_forecast_is_kept_and_records_without_one_are_as_before(
    store: ArtifactStore, source: Path, client: redis.Redis
) -> None:
    plain, told = store.publish(source, 1), store.publish(source, 1, forecast=3.5)
    assert store.get(plain.version).forecast is None
    assert store.get(told.version) == told
    assert told.forecast == 3.5
    written = client.hget("tasc:{task}:index:finger:records", str(plain.version))
    assert "forecast" not in json.loads(written)
